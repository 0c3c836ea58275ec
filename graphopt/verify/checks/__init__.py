"""Checks that look at single nodes or at the order of a graph, without evaluating it.

Inputs and results, metadata of new nodes, constants, process groups, launches of collectives,
random numbers and host calls: each file checks one of these against the graph before.
"""
