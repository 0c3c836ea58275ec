"""Graphs as text that a person wants to read: one graph, two compared, or in colour."""

from graphopt.readable.diff import graph_diff, text_diff
from graphopt.readable.rows import readable_bytes, sent_bytes
from graphopt.readable.terminal import print_diff, print_graph
from graphopt.readable.text import compact_text, graph_text

__all__ = [
    "compact_text",
    "graph_diff",
    "graph_text",
    "print_diff",
    "print_graph",
    "readable_bytes",
    "sent_bytes",
    "text_diff",
]
