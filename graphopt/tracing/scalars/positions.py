"""Indices and slice bounds that a step takes from tensors (`int(pointer)`), traced as symbols: one
graph for all. Those that are known before a call are constants of the graph, one for each.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt.tracing.scalars.numbers import TakenInt

_KEYED = ("__getitem__", "__setitem__")
_ARGUMENTS: dict[str, tuple[int, str]] = {
    "select": (2, "index"),
    "narrow": (2, "start"),
    "roll": (1, "shifts"),
}
"""Which argument of a torch function is a position, with its name."""


def placed(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a torch function with symbols in place of integers taken from tensors."""
    name = getattr(function, "__name__", "")
    if name in _KEYED and isinstance(args[0], torch.Tensor):
        return (args[0], _key(args[1]), *map(_position, args[2:])), kwargs
    if name not in _ARGUMENTS:
        return args, kwargs
    index, keyword = _ARGUMENTS[name]
    if len(args) > index:
        return (*args[:index], _key(args[index]), *args[index + 1 :]), kwargs
    if keyword in kwargs:
        return args, kwargs | {keyword: _key(kwargs[keyword])}
    return args, kwargs


def _key(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(_key, key))
    return _slice(key) if type(key) is slice else _position(key)


def _slice(bounds: slice) -> slice:
    """A slice whose bounds are symbols with a constant length or one constant bound. The graph
    holds for one length, or for one bound, so that it has plain sizes."""
    start, stop = map(_position, (bounds.start, bounds.stop))
    if isinstance(bounds.step, torch.SymInt):
        return bounds
    if not (isinstance(start, torch.SymInt) and isinstance(stop, torch.SymInt)):
        return bounds
    length = int(stop - start)  # asks which one it is, where it depends on anything
    return slice(start, start + length, bounds.step)


def _position(value: Any) -> Any:
    return torch.SymInt(value.node) if type(value) is TakenInt else value
