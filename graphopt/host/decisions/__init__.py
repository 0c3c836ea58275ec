"""Assumption nodes: a graph goes on only if decisions, sizes, and used parameters stay the same."""
