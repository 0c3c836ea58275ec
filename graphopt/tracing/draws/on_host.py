"""Numbers outside a step to which it adds what only Python computes, when the graph has run, and
arrays in whose place it leaves others of another size.

    total += np.sum(predicted.numpy() == labels.numpy())
    losses = losses + loss.detach().cpu().numpy()
    self.history = np.append(self.history, loss.item())

Each call takes the number or the array that it finds before its graph runs; what the step makes of
it is made when the graph has run, and is left there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphopt.tracing.besides import Besides, NumberBefore
from graphopt.tracing.draws.arrays import HostArray
from graphopt.tracing.draws.live import found_in, is_array
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.later import Later


def is_immutable_number(value: Any) -> bool:
    """Whether a value is a number of Python's or numpy's, which nothing changes in place."""
    numpy = sys.modules.get("numpy")
    scalar = numpy is not None and isinstance(value, numpy.number)
    return scalar or type(value) in (int, float)


def grows(before: Any, value: Any) -> bool:
    """Whether an array of another size than the one that is found there is left in a place."""
    if not is_array(before):
        return False
    if type(value) is Later:
        function, _ = value.made_by
        return getattr(function, "__name__", "") in _CHANGING_SIZES
    now = value.plain if type(value) is HostArray else value
    return is_array(now) and bool(now.shape != before.shape)


_CHANGING_SIZES = frozenset(
    {"append", "concatenate", "hstack", "vstack", "insert", "delete", "resize", "unique"}
)
"""Functions of numpy that give arrays of other sizes."""


class TakesNumber:
    """Takes the number, or the array, that is in a place when a call begins.

    Args:
        before: keeps it.
    """

    def __init__(self, before: NumberBefore) -> None:
        self._before = before

    def __call__(self) -> Any:
        """Whether there is a number; of an array what the graph goes by."""
        value = self._before.take()
        return (value.dtype.str, value.ndim) if is_array(value) else is_immutable_number(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._before == self._before

    def __hash__(self) -> int:
        return hash(self._before)


@contextmanager
def values_inserted(besides: Besides, calls: HostCalls, inputs: Inputs) -> Iterator[None]:
    """While active, what stands for such numbers and arrays is in their places."""
    real = [(each, each.place.now()) for each in besides.on_host]
    try:
        for before, number in real:
            if is_immutable_number(number):
                found = calls.found(TakesNumber(before), (), before.path)
                calls.by_value(found.expression, found.plain)
                before.place.write(Later(before, (), is_number=True))
            elif is_array(number):
                before.place.write(_array(before, number, calls, inputs))
        yield
    finally:
        for before, number in real:
            before.place.write(number)


def _array(before: NumberBefore, array: Any, calls: HostCalls, inputs: Inputs) -> Later:
    """What stands for an array of which no more is known than its type and its dimensions."""
    taken = calls.found(TakesNumber(before), (), before.path)
    calls.by_value(taken.expression, taken.plain)
    found_in(before.place, before.path, calls, inputs)
    found = Later(before, ())
    found.dimensions = array.ndim
    return found
