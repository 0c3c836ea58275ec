"""Random inputs for a graph from the metadata of its placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt.ir.metadata import input_kind, known_value

_SMALL = 0.1


def random_inputs(graph: fx.Graph, count: int, seed: int) -> list[list[Any]]:
    """Random values for each placeholder, for each of `count` replicas.

    State is the same on all replicas, what the user gives differs. Floats of state that is no
    parameter are positive, as second moments and running variances are; integers are 0 or 1, which
    are indices of nearly every table.

    Raises:
        TypeError: a placeholder has no metadata of a tensor or number.
    """
    draw = torch.Generator().manual_seed(seed)
    placeholders = graph.find_nodes(op="placeholder")
    rows = [_row(node, count, draw) for node in placeholders]
    return [[row[replica] for row in rows] for replica in range(count)]


def _row(node: fx.Node, count: int, draw: torch.Generator) -> Sequence[Any]:
    like, kind = known_value(node), input_kind(node)
    if isinstance(like, (bool, int, float)):
        return [like] * count
    if not isinstance(like, torch.Tensor):
        raise TypeError(f"%{node.name} has no metadata of a tensor")
    if kind == "user_input":
        return [_drawn(like, kind, draw) for _ in range(count)]
    value = _drawn(like, kind, draw)
    return [value, *(_with_layout(value, like) for _ in range(1, count))]


def _drawn(like: torch.Tensor, kind: str | None, draw: torch.Generator) -> torch.Tensor:
    shape = tuple(like.shape)
    if like.dtype is torch.bool or not (like.is_floating_point() or like.is_complex()):
        value = torch.randint(0, 2, shape, generator=draw)
    elif kind == "hyperparameter":
        value = torch.rand(shape, generator=draw, dtype=torch.float64) * _SMALL
    elif kind in ("buffer", "optimizer_state"):
        value = torch.rand(shape, generator=draw) + 0.5
    else:
        scale = _SMALL if kind == "parameter" else 1.0
        value = torch.randn(shape, generator=draw) * scale
    return _with_layout(value, like)


def _with_layout(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with the strides, dtype and device of `like`."""
    made = torch.empty_strided(
        tuple(like.shape), tuple(like.stride()), dtype=like.dtype, device=like.device
    )
    return made.copy_(value)
