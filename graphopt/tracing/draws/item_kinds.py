"""What the items of a list may be that a number of the call selects: tensors, arrays, numbers, and
tuples, lists and dictionaries of these, as replay memories keep."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from graphopt._compat.untraced import without_overrides
from graphopt.tracing.draws.arguments import gives_layout, kind_of_array, layout_of
from graphopt.tracing.draws.live import is_array
from graphopt.tracing.inputs import is_exact

_DEPTH = 4
_NESTS = (tuple, list, dict)


def is_item(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is one that each call may find another of in its place."""
    if value is None or type(value) in (bool, str) or is_exact(value) or is_array(value):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and _is_plain(value)
    if not isinstance(value, _NESTS):
        return _is_scalar(value)
    if depth == 0 or not (type(value) in _NESTS or hasattr(value, "_fields")):
        return False
    return all(is_item(each, depth - 1) for each in _parts(value))


def _is_plain(tensor: torch.Tensor) -> bool:
    with without_overrides():
        strided = tensor.layout is torch.strided and tensor.is_contiguous()
        return strided and not tensor.requires_grad


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def _parts(value: Any) -> Any:
    return value.values() if type(value) is dict else value


@gives_layout
def kind_of(value: Any) -> Any:
    """All that is known of an item but the values of tensors, arrays and numbers."""
    if isinstance(value, torch.Tensor):
        return type(value), layout_of(value), value.requires_grad
    if is_array(value):
        return kind_of_array(value)
    if type(value) is dict:
        return dict, tuple(value), tuple(map(kind_of, value.values()))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(kind_of, value))
    return type(value)


def rebuilt(value: Any, part: Callable[[Any, Any], Any]) -> Any:
    """A tuple, list or dictionary of what stands for its parts.

    Args:
        part: gives that, for a key and what is there.
    """
    if type(value) is dict:
        return {key: part(key, each) for key, each in value.items()}
    parts = [part(index, each) for index, each in enumerate(value)]
    return parts if type(value) is list else tuple.__new__(type(value), parts)


def is_nest(value: Any) -> bool:
    """Whether an item holds others."""
    return isinstance(value, _NESTS)
