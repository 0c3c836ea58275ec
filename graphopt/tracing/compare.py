"""Compare two traces of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.tracing.source import SourceLine


@dataclass(frozen=True)
class Difference:
    """The first place where two graphs differ."""

    what: str
    source: SourceLine | None


def first_difference(a: fx.GraphModule, b: fx.GraphModule) -> Difference | None:
    """The first node that differs in operator, arguments, constants or result; None if none does."""
    number_a = {node: i for i, node in enumerate(a.graph.nodes)}
    number_b = {node: i for i, node in enumerate(b.graph.nodes)}
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=False):
        source = x.meta.get("source") or y.meta.get("source")
        if x.op == "get_attr" and y.op == "get_attr":
            if not _same_constant(getattr(a, str(x.target)), getattr(b, str(y.target))):
                return Difference("a constant", _next_source(x) or source)
            continue
        if (x.op, x.target) != (y.op, y.target):
            return Difference(f"{x.target} in one, {y.target} in the other", source)
        if _comparable(x, number_a) != _comparable(y, number_b):
            return Difference(f"the arguments of {x.target}", source)
    if len(number_a) != len(number_b):
        return Difference(f"{len(number_a)} operations in one, {len(number_b)} in the other", None)
    return None


def _next_source(node: fx.Node) -> SourceLine | None:
    return next((user.meta["source"] for user in node.users if "source" in user.meta), None)


def _comparable(node: fx.Node, numbers: dict[fx.Node, int]) -> Any:
    """Arguments with nodes replaced by their positions, and constants by type and text."""

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (list, tuple)):
            return [encode(item) for item in value]
        if isinstance(value, dict):
            return {key: encode(item) for key, item in value.items()}
        return (type(value).__name__, repr(value))

    return encode([node.args, node.kwargs])


def _same_constant(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        if _compat.is_fake(x) or _compat.is_fake(y):
            return x.shape == y.shape and x.dtype == y.dtype
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
    return type(x) is type(y)
