"""Indices and slice bounds that are known before a call, traced as symbols: one graph for all.

In a position or a bound of a slice a known number is a symbol that has its value of this call.
What torch asks of it (is it negative? does the slice end within the tensor?) is answered for that
value, and each answer is a condition of the graph, looked at before a call runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.sizes import AnsweredQuestions, backed
from graphopt.tracing.effects.decisions import SIZED
from graphopt.tracing.interception.replaced_functions import is_in
from graphopt.tracing.scalars.expressions import Condition, Conditions
from graphopt.tracing.scalars.host_numbers import HostNumber, is_host_number
from graphopt.tracing.scalars.numbers import TakenInt

_KEYED = ("__getitem__", "__setitem__")
_ARGUMENTS: dict[str, tuple[int, str]] = {
    "select": (2, "index"),
    "narrow": (2, "start"),
    "roll": (1, "shifts"),
}
"""Which argument of a torch function is a position, with its name."""

_FUNCTIONS = frozenset(
    getattr(owner, name)
    for name in _ARGUMENTS
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
)

_ALIKE = (operator.add, operator.sub, operator.mul)


class Positions:
    """The symbols for known integers used as positions in one trace.

    Args:
        tracer: records the step.
        mode: in which it computes.
        conditions: of the graph.
    """

    def __init__(self, tracer: Any, mode: Any, conditions: Conditions) -> None:
        self._tracer, self._mode, self._conditions = tracer, mode, conditions
        self._questions = AnsweredQuestions(mode)
        self._known: dict[Any, Any] = {}
        self._numbers: dict[Any, int] = {}

    def of(self, number: HostNumber) -> Any:
        """The symbol for an integer that is known before a call."""
        known = self._known.get(number.expression)
        if known is None:
            known = self._known[number.expression] = self._made(number)
        return known

    def _made(self, number: HostNumber) -> Any:
        function, args = number.made_by
        if function in _ALIKE and all(map(_is_integer, args)):
            return function(*(self.of(arg) if is_host_number(arg) else arg for arg in args))
        position, symbol = backed(self._mode, number.value, False)
        _compat.record_known(int, (number,), position)
        node = _compat.node_of(self._tracer, position)
        assert node is not None
        node.meta[SIZED] = True
        order, numbers, questions = len(self._numbers), self._numbers, self._questions
        numbers[symbol] = number.value
        questions.add(symbol, order, False)

        def hold(value: Any, _: None) -> bool:
            """True if the guards on the symbol hold for a number."""
            if type(value) is not int:
                return False
            numbers[symbol] = value
            return questions.hold(order, numbers)

        self._conditions.add(Condition(hold, number.expression, None, True))
        return position


def takes_positions(callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The function to call in place of a torch function that takes a position and would turn it
    into a plain number, or None."""
    function = callee
    if isinstance(getattr(callee, "__self__", None), torch.Tensor):
        function = getattr(torch.Tensor, callee.__name__, None)
    if not is_in(function, _FUNCTIONS):
        return None
    first = () if function is callee else (callee.__self__,)

    def call(*args: Any, **options: Any) -> Any:
        args, options = placed(function, (*first, *args), options)
        return function(*args, **options)

    return call


def placed(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a torch function with symbols in place of known positions."""
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
    if _is_symbol(bounds.step):
        return bounds
    if not all(map(_is_symbol, (start, stop))):
        return bounds
    length = int(stop - start)  # asks which one it is, where it depends on anything
    return slice(start, start + length, bounds.step)


def _position(value: Any) -> Any:
    if type(value) is TakenInt:
        return torch.SymInt(value.node)
    if is_host_number(value) and type(value.value) is int:
        return value.notes.positions.of(value)
    return value


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or is_host_number(value)


def _is_integer(value: Any) -> bool:
    return type(value.value if is_host_number(value) else value) is int
