"""Graphs as text for people: one graph, or the difference between two.

`graphopt.readable.terminal` prints both in colour.
"""

from graphopt.readable.columns import readable_bytes
from graphopt.readable.diff import graph_diff, text_diff
from graphopt.readable.plain_text import compact_text, graph_text, listing_of
from graphopt.readable.rows import sent_bytes

__all__ = [
    "compact_text",
    "graph_diff",
    "graph_text",
    "listing_of",
    "readable_bytes",
    "sent_bytes",
    "text_diff",
]
