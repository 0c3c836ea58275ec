"""What a graph knows of numbers that are known before a call: how they are computed from those that
it takes, and what was asked about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """Number `index` among those that the graph takes."""

    index: int


@dataclass(frozen=True)
class Application:
    """A function of other expressions."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def evaluate(expression: Any, values: Sequence[Any]) -> Any:
    """The value of an expression: a leaf, a term or a constant."""
    if isinstance(expression, Leaf):
        return values[expression.index]
    if isinstance(expression, Application):
        return expression.function(*(evaluate(each, values) for each in expression.args))
    return expression


def leaves_of(expression: Any) -> Iterator[int]:
    """All numbers that an expression depends on."""
    if isinstance(expression, Leaf):
        yield expression.index
    for arg in expression.args if isinstance(expression, Application) else ():
        yield from leaves_of(arg)


def first_leaf(expression: Any) -> int | None:
    """The first number that an expression depends on."""
    return next(leaves_of(expression), None)


@dataclass(frozen=True)
class Condition:
    """A comparison with the answer that the trace was given."""

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
    """What was asked about such numbers in the traces of one capture.

    Attributes:
        all: the answers given.
    """

    all: list[Condition] = field(default_factory=list)

    def add(self, condition: Condition) -> None:
        if condition not in self.all:
            self.all.append(condition)

    def broken(self, values: Sequence[Any]) -> Condition | None:
        """The first that does not hold."""
        return next((each for each in self.all if not each.holds(values)), None)


def same_value(a: Any, b: Any) -> bool:
    """Whether two constants are one, and of one sign where they are zero."""
    if type(a) is not type(b) or a != b:
        return False
    return type(a) is not float or math.copysign(1.0, a) == math.copysign(1.0, b)
