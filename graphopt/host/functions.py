"""What a function of the user's is: its name, and whether two traces have made the same one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphopt import _compat

_PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.device)
_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)
_DEPTH = 8
_NONE: Mapping[int, Any] = {}


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a text or the like, which nobody changes."""
    of_numpy = hasattr(value, "tobytes") and getattr(value, "ndim", None) == 0
    return of_numpy or isinstance(value, (*_PLAIN, torch.Size, range, frozenset))


def name_of(fn: Callable[..., Any]) -> str:
    """A function in a word or two, the same on every rank and in every run."""
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    code = getattr(fn, "__code__", None)
    return name if code is None else f"{name}:{code.co_firstlineno}"


def parts_of(fn: Any) -> tuple[object, list[Any]] | None:
    """What does not change when a function is made again, and what it holds; None for an object
    that is no function and no tuple."""
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


def is_same(one: Any, other: Any, depth: int = _DEPTH, given: Mapping[int, Any] = _NONE) -> bool:
    """Whether two objects, one from each of two traces, are one object, equal constants, or
    functions of one text that hold the same.

    Args:
        given: where containers of either trace are among the arguments of the step, by id.
    """
    if one is other:
        return True
    if id(one) in given or id(other) in given:
        return bool(given.get(id(one)) == given.get(id(other)))
    if type(one) is not type(other) or not depth:
        return False
    if isinstance(one, (*_PLAIN, torch.Size)):
        return repr(one) == repr(other)
    if hasattr(one, "tobytes") and getattr(one, "ndim", None) == 0:  # a scalar of numpy's
        return bool((one.dtype, one.tobytes()) == (other.dtype, other.tobytes()))
    if hasattr(type(one), "repeats"):
        return bool(one.repeats(other))
    mine, theirs = parts_of(one), parts_of(other)
    if mine is None or theirs is None or mine[0] != theirs[0]:
        return _is_same_container(one, other, depth)
    return _all_same(mine[1], theirs[1], depth, given)


def _is_same_container(one: Any, other: Any, depth: int) -> bool:
    """Whether both are lists or dictionaries of nothing but equal constants."""
    if type(one) is list and one:
        return _all_same(one, other, depth) and all(isinstance(i, _PLAIN) for i in one)
    if type(one) is dict and one:
        return one.keys() == other.keys() and all(
            isinstance(value, _PLAIN) and is_same(value, other[key]) for key, value in one.items()
        )
    return False


def _all_same(
    ones: Sequence[Any], others: Sequence[Any], depth: int, given: Mapping[int, Any] = _NONE
) -> bool:
    if len(ones) != len(others):
        return False
    return all(is_same(a, b, depth - 1, given) for a, b in zip(ones, others, strict=True))


def traced_in(fn: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Traced tensors and numbers that a function would use without being given them."""
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
