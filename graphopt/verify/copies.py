"""Is a graph a copy of another, node by node? Then nothing has to be evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from graphopt.verify.recall import same_constant


def is_copy_of(graph: fx.Graph, copy: fx.Graph) -> bool:
    """Whether both have the same nodes, in one order, with the same arguments and metadata."""
    if len(graph.nodes) != len(copy.nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for node, twin in zip(graph.nodes, copy.nodes, strict=True):
        if (node.op, node.target) != (twin.op, twin.target):
            return False
        if node.meta.get("val") is not twin.meta.get("val"):
            return False
        if not _same((node.args, node.kwargs), (twin.args, twin.kwargs), twins):
            return False
        twins[node] = twin
    return True


def _same(given: Any, copied: Any, twins: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether arguments are those of a copy: constants that are written alike, and not just equal
    (0.0 and -0.0, 1 and True)."""
    if isinstance(given, fx.Node):
        return twins.get(given) is copied
    if isinstance(given, (list, tuple)):
        if not isinstance(copied, (list, tuple)) or len(given) != len(copied):
            return False
        return all(_same(a, b, twins) for a, b in zip(given, copied, strict=True))
    if isinstance(given, dict):
        if not isinstance(copied, dict) or given.keys() != copied.keys():
            return False
        return all(_same(value, copied[name], twins) for name, value in given.items())
    if isinstance(given, slice):
        return isinstance(copied, slice) and _same(_ends(given), _ends(copied), twins)
    return same_constant(given, copied)


def _ends(value: slice) -> tuple[Any, ...]:
    return value.start, value.stop, value.step
