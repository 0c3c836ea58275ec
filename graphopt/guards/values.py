"""Values that guards hold, and how they are compared with what is there now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from graphopt.ir.same_values import same_value
from graphopt.tracing.tensors.classes import special_class
from graphopt.tracing.tensors.lost_history import kind_of_history

_PLAIN = (int, float, bool, str, complex, bytes, type(None), torch.dtype)


_KIND: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(
    "shape", "layout", "dtype", "device", "requires_grad"
)
_STRIDE = methodcaller("stride")
_WITH_STRIDES = (torch.strided, torch.sparse_coo)


def tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a graph is specialized on about a tensor."""
    special = special_class(tensor) or kind_of_history(tensor)
    if tensor.is_nested:
        return (None, None, tensor.layout, tensor.dtype, tensor.device, None, special)
    shape, layout, *others = _KIND(tensor)
    strides = tensor.stride() if layout in _WITH_STRIDES else None
    return (shape, strides, layout, *others, special)


def gradient_kind(tensor: torch.Tensor) -> Any:
    """What a graph is specialized on about the gradient of a tensor that is an argument: None where
    it has none, and where none can be computed; its kind; or that the tensor is no leaf."""
    if not tensor.is_leaf:
        return "computed"
    return None if tensor.grad is None else (tensor_kind(tensor.grad), tensor.grad.is_leaf)


def kinds_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    """What `tensor_kind` says of each, in other order, in half of its time."""
    return list(map(_KIND, tensors)), list(map(_STRIDE, tensors))


def items(value: object) -> list[Any] | None:
    """What a list or dictionary contains, to compare with later."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list) else None


def same_items(before: list[Any], container: object) -> bool:
    """Whether a container holds the objects or constants that it held."""
    now = items(container)
    if now is None or len(now) != len(before):
        return False
    return all(a is b or same_constant(a, b) for a, b in zip(now, before, strict=True))


def same_constant(a: Any, b: Any) -> bool:
    """Whether two values are one object, or plain constants of one type that are equal."""
    return same_value(a, b, is_plain)


def is_plain(value: object) -> bool:
    """Whether a value is compared by value; all others are by identity."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def change(kind: tuple[Any, ...] | None, now: Any) -> str:
    """How a tensor differs from the kind that it was, in brackets; empty where it is none now."""
    if kind is None or not isinstance(now, torch.Tensor) or tensor_kind(now) == kind:
        return ""
    return f" ({describe(kind, tensor_kind(now))})"


def describe(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The first difference between two kinds of tensors, as text."""
    names = ("shape", "stride", "layout", "dtype", "device", "requires_grad", "class")
    differing = _differing(names, before, now)
    name, old, new = next(differing)
    old, new = (list(each) if isinstance(each, torch.Size) else each for each in (old, new))
    return f"{name} {old} became {new}"


def _differing(
    names: tuple[str, ...], before: tuple[Any, ...], now: tuple[Any, ...]
) -> Iterator[tuple[str, Any, Any]]:
    return ((n, a, b) for n, a, b in zip(names, before, now, strict=True) if a != b)
