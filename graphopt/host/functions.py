"""Facts about users' functions: a stable name, and what they hold."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.device)
_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)
_DEPTH = 8


def is_constant(value: Any) -> bool:
    """True if a value is an immutable constant such as a number or text."""
    of_numpy = hasattr(value, "tobytes") and getattr(value, "ndim", None) == 0
    return of_numpy or isinstance(value, (*_PLAIN, torch.Size, range, frozenset))


def name_of(fn: Callable[..., Any]) -> str:
    """A short name of a function, equal on every rank and in every run."""
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    code = getattr(fn, "__code__", None)
    return name if code is None else f"{name}:{code.co_firstlineno}"


def parts_of(fn: Any) -> list[Any] | None:
    """The values that a function holds; None for other objects, except tuples."""
    if isinstance(fn, types.FunctionType):
        named = (fn.__kwdefaults__ or {}).values()
        return [*gc.get_referents(*(fn.__closure__ or ())), *(fn.__defaults__ or ()), *named]
    if isinstance(fn, types.MethodType):
        return [fn.__self__, fn.__func__]
    if isinstance(fn, types.BuiltinMethodType):
        return [fn.__self__]
    if isinstance(fn, functools.partial):
        return [fn.func, *fn.args, *fn.keywords.values()]
    return list(fn) if type(fn) is tuple else None


def traced_in(fn: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yields traced tensors and numbers that a function refers to other than by its arguments."""
    if _compat.is_fake(fn) or isinstance(fn, _NUMBERS):
        yield fn
        return
    held: Sequence[Any] = parts_of(fn) or ()
    if type(fn) in (list, set, dict):
        held = list(fn.values()) if type(fn) is dict else list(fn)
    if depth:
        for part in held:
            yield from traced_in(part, depth - 1)
