"""Functions that call another one with its arguments in another way, and what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphopt.tracing.arrays import Method


class Named:
    """Calls a function with names for its last arguments."""

    def __init__(self, function: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.function, self.names = function, names
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any) -> Any:
        count = len(args) - len(self.names)
        return self.function(*args[:count], **dict(zip(self.names, args[count:], strict=True)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(vars(other) == vars(self))

    def __hash__(self) -> int:
        return hash(self.names)


class Swapped(Method):
    """An operator whose operands are the other way round."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function.__name__)
        self.function = function

    def __call__(self, one: Any, other: Any) -> Any:
        return self.function(other, one)


def called_by(function: Callable[..., Any]) -> Any:
    """The function that one calls which gives it its arguments in another way."""
    return function.function if isinstance(function, (Named, Swapped)) else function


def is_numpy_of_tensor(function: Any) -> bool:
    """Whether a function gives the array in the memory of a tensor."""
    return isinstance(function, Method) and function.__name__ == "numpy"


def joined(*pieces: Any) -> str:
    """Pieces of a text, as one."""
    return "".join(pieces)
