"""Bitwise comparison of two trained models: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphopt.ir.bits import same_bits


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two trained models bit for bit.

    Attributes:
        tensors: the number of tensors that were compared.
        differing: names of those whose bits differ.
        largest: the largest absolute difference of two elements; infinite where one is not a
            number or a tensor is missing on one side.
    """

    tensors: int
    differing: tuple[str, ...]
    largest: float


def compare(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> Comparison:
    """Compares parameters, buffers and optimizer state of two models bit for bit."""
    left, right = dict(_state(*one)), dict(_state(*other))
    names = list(left | right)
    differences = {name: _difference(left.get(name), right.get(name)) for name in names}
    differing = {name: size for name, size in differences.items() if size is not None}
    return Comparison(len(names), tuple(differing), max(differing.values(), default=0.0))


def _state(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            yield f"optimizer state {index}.{key}", torch.as_tensor(value)


def _difference(one: Tensor | None, other: Tensor | None) -> float | None:
    """The largest difference of two tensors, or None if their bits are equal."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if same_bits(one, other):
        return None
    one, other = one.detach().cpu(), other.detach().cpu()
    size = (one.double() - other.double()).abs().max().item()
    return size if size == size else float("inf")
