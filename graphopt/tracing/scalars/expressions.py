"""Symbolic expressions of numbers known before a call: how they derive from a graph's inputs, and
the conditions that a trace tested on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """An expression for the graph's number input `index`."""

    index: int


@dataclass(frozen=True)
class Application:
    """An expression that applies a function to other expressions."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def evaluate(expression: Any, values: Sequence[Any]) -> Any:
    """The value of an expression, given the values of the graph's number inputs."""
    if isinstance(expression, Leaf):
        return values[expression.index]
    if isinstance(expression, Application):
        return expression.function(*(evaluate(each, values) for each in expression.args))
    return expression


def leaves_of(expression: Any) -> Iterator[int]:
    """Yields the indices of all number inputs in an expression."""
    if isinstance(expression, Leaf):
        yield expression.index
    for arg in expression.args if isinstance(expression, Application) else ():
        yield from leaves_of(arg)


def first_leaf(expression: Any) -> int | None:
    """The index of the first number input in an expression, or None."""
    return next(leaves_of(expression), None)


@dataclass(frozen=True)
class Condition:
    """A tested comparison of two expressions, with its outcome at capture."""

    compare: Callable[[Any, Any], Any]
    left: Any
    right: Any
    answer: bool

    def holds(self, values: Sequence[Any]) -> bool:
        try:
            now = self.compare(evaluate(self.left, values), evaluate(self.right, values))
        except (ArithmeticError, ValueError, TypeError):  # such as an order of complex numbers
            return False
        return bool(now) is self.answer


@dataclass
class Conditions:
    """The conditions that one capture's traces tested on number inputs.

    Attributes:
        all: the answers given.
    """

    all: list[Condition] = field(default_factory=list)

    def add(self, condition: Condition) -> None:
        if condition not in self.all:
            self.all.append(condition)

    def broken(self, values: Sequence[Any]) -> Condition | None:
        """The first condition with another outcome for these values, or None."""
        return next((each for each in self.all if not each.holds(values)), None)


def same_value(a: Any, b: Any) -> bool:
    """True if two constants have the same type and value; 0.0 and -0.0 differ."""
    if type(a) is not type(b) or a != b:
        return False
    return type(a) is not float or math.copysign(1.0, a) == math.copysign(1.0, b)
