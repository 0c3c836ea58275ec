"""Symbolic evaluation: one walk over a graph that gives each node its symbolic value.

`evaluation` is the walk. It keeps the contents of storages, so that updates in place are seen
through all aliases, the collectives that are under way, and the outcome: results, state, random
draws, and the elements that are sent.
"""
