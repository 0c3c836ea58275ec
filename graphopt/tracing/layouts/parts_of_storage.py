"""Inputs that share one storage, such as gradients that a program has cut from one tensor.

    flat = torch.cat([p.grad.flatten() for p in parameters])
    for p, part in zip(parameters, flat.split(sizes)):
        p.grad = part.reshape(p.shape)

Parts that do not overlap are places of their own: a write to one is none to another. So they are
traced as tensors with storage of their own. Others are refused: the graph would hide a write to
one from the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.inputs.entries import Kind

_SHARING = ("user_input", "hyperparameter")
"""Kinds of inputs that may share storage with any other."""


def refuse_overlaps(kinds: Iterable[tuple[Kind, str]], values: Sequence[torch.Tensor]) -> None:
    """Refuses a step with two inputs that overlap in memory.

    Args:
        kinds: kind and name of each input.
        values: what they are when the call begins.
    """
    owners: defaultdict[int, list[tuple[torch.Tensor, str]]] = defaultdict(list)
    for (kind, fqn), tensor in zip(kinds, values, strict=True):
        if kind in _SHARING or tensor.numel() == 0:
            continue
        others = owners[_compat.storage_key(tensor)]
        for other, name in others:
            if name != fqn and overlap(tensor, other):
                raise CaptureError(
                    f"{name} and {fqn} share storage",
                    hint="give one of them storage of its own (tensor.clone())",
                )
        others.append((tensor, fqn))


def of_their_own(
    kinds: Iterable[tuple[Kind, str]], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the tensors to trace, with copies in place of inputs that share a storage."""
    owners: dict[int, str] = {}

    def is_part(kind: Kind, fqn: str, tensor: torch.Tensor) -> bool:
        if kind in _SHARING or tensor.numel() == 0:
            return False
        return owners.setdefault(_compat.storage_key(tensor), fqn) != fqn

    return [
        _alike(tensor) if is_part(kind, fqn, tensor) else tensor
        for (kind, fqn), tensor in zip(kinds, values, strict=True)
    ]


_MANY = 1_000_000
"""The most elements of two tensors that are compared one by one."""


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one storage share a byte. Large interleaved ones count as
    overlapping."""
    first, second = _bytes_of(one), _bytes_of(other)
    if first.start >= second.stop or second.start >= first.stop:
        return False
    size = one.element_size()
    if size != other.element_size() or one.numel() + other.numel() > _MANY:
        return True
    return not _elements_of(one).isdisjoint(_elements_of(other))


def _bytes_of(tensor: torch.Tensor) -> range:
    """Returns the range of bytes that a tensor spans in its storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return range(first * size, (first + last + 1) * size)


def _elements_of(tensor: torch.Tensor) -> set[int]:
    """Returns the storage positions of a tensor's elements."""
    found = {int(tensor.storage_offset())}
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = {start + step * stride for start in found for step in range(count)}
    return found


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised tensor with the same layout in a new storage."""
    with torch.no_grad():
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = tensor.new_empty(length).untyped_storage()
        alike = tensor.new_empty(0).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return alike.requires_grad_(tensor.requires_grad)
