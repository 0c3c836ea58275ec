"""Differences between two evaluations, and their smallest explanation in both graphs."""
