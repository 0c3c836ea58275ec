"""Facts about users' functions: a stable name, and parts by which copies of two traces compare."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
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


def parts_of(fn: Any) -> tuple[object, list[Any]] | None:
    """The code of a function, equal whenever it is defined again, and the values it holds; None for
    other objects, except tuples."""
    if isinstance(fn, types.FunctionType):
        cells = [_content(cell) for cell in fn.__closure__ or ()]
        named = sorted((fn.__kwdefaults__ or {}).items())
        return fn.__code__, [*cells, *(fn.__defaults__ or ()), *(value for _, value in named)]
    if isinstance(fn, types.MethodType):
        return "method", [fn.__func__, fn.__self__]
    if isinstance(fn, types.BuiltinMethodType):
        return fn.__name__, [fn.__self__]
    if isinstance(fn, functools.partial):
        named = sorted(fn.keywords.items())
        names = tuple(name for name, _ in named)
        return names, [fn.func, *fn.args, *(value for _, value in named)]
    return (type(fn), list(fn)) if type(fn) is tuple else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None


def traced_in(fn: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yields traced tensors and numbers that a function refers to other than by its arguments."""
    if _compat.is_fake(fn) or isinstance(fn, _NUMBERS):
        yield fn
        return
    parts = parts_of(fn)
    held = [] if parts is None else parts[1]
    if type(fn) in (list, set, dict):
        held = list(fn.values()) if type(fn) is dict else list(fn)
    if depth:
        for part in held:
            yield from traced_in(part, depth - 1)
