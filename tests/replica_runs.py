"""Captured steps run on several replicas in one process, on random inputs, and compared."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.replicas import Lockstep, ReplicatedStep
from graphopt.replicas.replica_steps import results_of

Row = list[Any]
"""One value for each replica."""


def run_steps(
    gm: fx.GraphModule, inputs: Sequence[Row], iterations: int, seed: int = 0
) -> list[Row]:
    """Rows of everything that some iterations return, and of the state that they leave.

    Late work runs as it does: one iteration later, and at the end.
    """
    rows = [[_copied(value) for value in row] for row in inputs]
    torch.manual_seed(seed)
    step = ReplicatedStep(gm, Lockstep(len(rows[0])))
    kinds = [node.meta.get("kind") for node in gm.graph.nodes if node.op == "placeholder"]
    found: list[Row] = []
    for iteration in range(iterations):
        if iteration:
            rows = [_next(row, kind) for row, kind in zip(rows, kinds, strict=True)]
        values = [list(own) for own in zip(*rows, strict=True)]
        returned = step(values, last_iter=iteration == iterations - 1)
        results = [results_of(gm.graph, theirs) for theirs in returned]
        found += [[_copied(value) for value in row] for row in zip(*results, strict=True)]
    return [*found, *rows]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _next(row: Row, kind: str | None) -> Row:
    """What a placeholder gets in the next iteration."""
    if kind == "hyperparameter":
        return [value * 0.9 for value in row]
    if kind == "user_input" and isinstance(row[0], Tensor) and row[0].dim():
        return [value.roll(1, 0) for value in row]
    return row


def difference(one: Sequence[Row], other: Sequence[Row]) -> str | None:
    """Where two runs do not agree bit for bit; None: nowhere."""
    if len(one) != len(other):
        return f"{len(other)} values in place of {len(one)}"
    for index, (old, new) in enumerate(zip(one, other, strict=True)):
        for rank, (a, b) in enumerate(zip(old, new, strict=True)):
            if not same_bits(a, b):
                return f"value {index} of replica {rank}"
    return None


def same_bits(a: Any, b: Any) -> bool:
    """Whether all bits are equal, but for those that tell one NaN from another."""
    a, b = map(_as_tensor, (a, b))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(operator.eq(a, b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.is_complex():
        a, b = (torch.view_as_real(value.resolve_conj()) for value in (a, b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    same = (a == b) & (a.signbit() == b.signbit())
    return bool((same | (a.isnan() & b.isnan())).all())


def _as_tensor(value: Any) -> Any:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value) if isinstance(value, int) else value


def random_inputs(specs: Sequence[Any], values: Sequence[Any], count: int, seed: int) -> list[Row]:
    """Rows for the placeholders of a captured step: state is the same for all replicas and near
    what it was, what the user gives differs."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for spec, value in zip(specs, values, strict=True):
        if not isinstance(value, Tensor):
            rows.append([value] * count)
        elif spec.kind == "user_input":
            rows.append([_drawn(value, draw, rank) for rank in range(count)])
        else:
            moved = _moved(value.detach(), spec.kind, draw)
            rows.append([moved.clone() for _ in range(count)])
    return rows


def _drawn(value: Tensor, draw: torch.Generator, rank: int) -> Tensor:
    if value.dim() and value.is_floating_point():
        return torch.randn(value.shape, generator=draw).to(value.dtype)
    return value.roll(rank, 0).clone() if value.dim() else value.clone()


def _moved(value: Tensor, kind: str, draw: torch.Generator) -> Tensor:
    if not value.is_floating_point() or not value.dim():
        return value
    noise = torch.rand(value.shape, generator=draw).to(value.dtype)
    moved = value * (noise + 0.5)
    if kind in ("parameter", "gradient"):
        moved = moved + (noise - 0.5) * 0.1
    if value.stride() == moved.stride():
        return moved
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(moved)
