"""Implementations of the commands that `graphopt.cli` declares, except the demo."""
