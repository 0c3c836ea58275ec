"""Arguments of calls that run before the graph: constants, and what is known by then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any, TypeVar

import torch

from graphopt.tracing.draws.program import ArrayConstant
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.number_expressions import Application
from graphopt.tracing.numbers import SYMBOLIC

_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, PurePath),
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_FEW = 10_000
_DEPTH = 4
"""How deep nested lists are looked through; a list may contain itself."""


class UnknownArgumentError(Exception):
    """An argument is not known before the graph runs; what it is."""


class FoundByGraph:
    """What stands for a value that is computed when the graph has run."""

    __slots__ = ()


class Known:
    """What stands for a value that is known before the graph runs.

    Attributes:
        expression: how it is found.
        plain: the value in this call.
    """

    def __init__(self, expression: Any, plain: Any) -> None:
        self.expression, self.plain = expression, plain


def is_known(value: Any) -> bool:
    """Whether something stands for a value that the host computes, other than a number."""
    return issubclass(type(value), Known)


def any_known(values: Iterable[Any]) -> bool:
    """Whether such a value, or such a number, is among some, or in lists, tuples and slices."""
    return any(map(_holds_known, values))


def _holds_known(value: Any, depth: int = _DEPTH) -> bool:
    if type(value) in (list, tuple):
        few = depth > 0 and len(value) <= _FEW
        return few and any(_holds_known(each, depth - 1) for each in value)
    if type(value) is slice:
        return any(map(_holds_known, (value.start, value.stop, value.step)))
    return is_known(value) or is_host_number(value)


def expression_of(value: Any, depth: int = _DEPTH) -> Any:
    """An argument as an expression, or a constant.

    Raises:
        UnknownArgumentError: it is neither.
    """
    if is_known(value) or is_host_number(value):
        return value.expression
    if type(value) in (list, tuple):
        if len(value) > _FEW or depth == 0:
            raise UnknownArgumentError(f"a large {type(value).__name__}")
        items = (expression_of(each, depth - 1) for each in value)
        return Application(_BUILDERS[type(value)], tuple(items))
    if type(value) is slice:
        return Application(slice, tuple(map(expression_of, (value.start, value.stop, value.step))))
    if isinstance(value, (*SYMBOLIC, torch.Tensor, FoundByGraph)):
        raise UnknownArgumentError("the value of a tensor")
    if isinstance(value, _PLAIN):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        return Application(ArrayConstant(value), ())
    if numpy is not None and isinstance(value, (numpy.generic, numpy.dtype)):
        return value
    raise UnknownArgumentError(f"a {type(value).__name__}")


def are_constants(values: Iterable[Any]) -> bool:
    """Whether all arguments are expressions, or constants."""
    try:
        list(map(expression_of, values))
    except UnknownArgumentError:
        return False
    return True


def plain(value: Any) -> Any:
    """An argument, or a key, as it is in this call."""
    if is_known(value):
        return value.plain
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value.value if is_host_number(value) else value


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _tupled(*values: Any) -> tuple[Any, ...]:
    return values


_BUILDERS: dict[type, Any] = {list: _listed, tuple: _tupled}


class Method:
    """Calls a method of its first argument.

    Args:
        name: of the method.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, /, *args: Any, **options: Any) -> Any:
        return getattr(value, self.__name__)(*args, **options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(vars(other) == vars(self))

    def __hash__(self) -> int:
        return hash(self.__name__)


class Metadata(Method):
    """Reads what is known of an array but its values."""

    def __call__(self, value: Any, /, *args: Any, **options: Any) -> Any:
        return getattr(value, self.__name__)


_LAYOUT = "gives_layout"


def gives_layout(function: _Function) -> _Function:
    """Mark a function that gives no values of a tensor or array, but how it lies in memory."""
    setattr(function, _LAYOUT, True)
    return function


@gives_layout
def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


@gives_layout
def kind_of_array(array: Any) -> tuple[Any, ...]:
    """All that is known of an array but its values; of anything else its type."""
    if not hasattr(array, "strides"):
        return (type(array),)
    return type(array), array.dtype.str, array.shape, array.strides


def is_layout(expression: Any) -> bool:
    """Whether an expression gives no values of a tensor or array, but how it lies in memory."""
    if not isinstance(expression, Application):
        return False
    function = expression.function
    return isinstance(function, Metadata) or getattr(function, _LAYOUT, False)
