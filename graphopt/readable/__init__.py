"""Graphs as text that a person wants to read: one graph, or two compared.

`graphopt.readable.terminal` prints both in colour. It is not imported here: the library it uses
draws from Python's random generator when it is imported, which a training program would notice.
"""

from graphopt.readable.diff import graph_diff, text_diff
from graphopt.readable.rows import readable_bytes, sent_bytes
from graphopt.readable.text import compact_text, graph_text

__all__ = [
    "compact_text",
    "graph_diff",
    "graph_text",
    "readable_bytes",
    "sent_bytes",
    "text_diff",
]
