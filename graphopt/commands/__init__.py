"""Implementations of the commands that `graphopt.cli` declares; the demo is in `graphopt.demo`."""
