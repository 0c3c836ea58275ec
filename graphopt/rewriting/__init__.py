"""Declarative rewrites: a pattern and its replacement, both written as Python functions.

    pattern(q, k, v)                                     replacement(q, k, v)
    softmax(q @ k.transpose(-2, -1)) @ v        ==>      scaled_dot_product_attention(q, k, v)

Both are traced to ATen, with the backward side where one is asked for, found in the graph, and
exchanged (`graphopt.rewriting.rewriting`).
"""

from graphopt.rewriting.matching import Match
from graphopt.rewriting.patterns import RewriteError
from graphopt.rewriting.rewriting import rewrite

__all__ = ["Match", "RewriteError", "rewrite"]
