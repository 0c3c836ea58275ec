"""Guards on numbers that are inputs: their types, and the conditions that the step tested on
them."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs
from graphopt.tracing.scalars.expressions import first_leaf
from graphopt.tracing.scalars.host_numbers import EXACT

_UNCHANGEABLE = frozenset({int, float, bool, complex})


class NumberGuards:
    """Guards on the hyperparameters of a step. Numbers that fit are not looked at again."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self._inputs = inputs
        self._types = [type(number.read(call)) for number in inputs.hyperparameters]
        self._read: tuple[weakref.ref[Call], list[Any]] | None = None
        self._fitting: list[Any] = []

    def of(self, call: Call) -> list[Any]:
        """Returns the hyperparameters of a call that fits, in order."""
        found, self._read = self._read, None
        if found is not None and found[0]() is call:  # another thread may have asked since
            return found[1]
        return [number.read(call) for number in self._inputs.hyperparameters]

    def mismatch(self, call: Call) -> str | None:
        """Describes the first number of another type, or for which a tested condition changed, or
        returns None."""
        numbers = self._inputs.hyperparameters
        values = [number.read(call) for number in numbers]
        self._read = weakref.ref(call), values
        if len(values) == len(self._fitting) and all(map(is_, values, self._fitting)):
            return None
        self._fitting = []
        kinds = zip(numbers, values, self._types, strict=True)
        for at, (number, value, kind) in enumerate(kinds):
            if at in self._inputs.unread and _are_floats(value, kind):
                continue
            if type(value) is not kind or (kind is int and abs(value) >= EXACT):
                return f"{_called(number)} became {value!r}"
        broken = self._inputs.conditions.broken(values)
        if broken is not None:
            leaves = map(first_leaf, (broken.left, broken.right))
            index = next(leaf for leaf in leaves if leaf is not None)
            return f"{_called(numbers[index])} became {values[index]!r}"
        if all(type(value) in _UNCHANGEABLE for value in values):
            self._fitting = values
        return None


def _are_floats(value: object, kind: type) -> bool:
    return isinstance(value, float) and issubclass(kind, float)


def _called(number: Any) -> str:
    """Returns the name of a number in messages."""
    return f"argument {number.fqn}" if isinstance(number, ArgumentNumber) else str(number.fqn)
