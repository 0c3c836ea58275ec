"""Numbers outside a step to which it adds what only Python computes, when the graph has run.

    total += np.sum(predicted.numpy() == labels.numpy())
    losses = losses + loss.detach().cpu().numpy()

Each call takes the number that it finds before its graph runs; what the step makes of it is made
when the graph has run, and is left there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphopt.tracing.besides import Besides, NumberBefore
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.later import Later


def is_immutable_number(value: Any) -> bool:
    """Whether a value is a number of Python's or numpy's, which nothing changes in place."""
    numpy = sys.modules.get("numpy")
    scalar = numpy is not None and isinstance(value, numpy.number)
    return scalar or type(value) in (int, float)


class TakesNumber:
    """Takes the number that is in a place when a call begins.

    Args:
        before: keeps it.
    """

    def __init__(self, before: NumberBefore) -> None:
        self._before = before

    def __call__(self) -> bool:
        """Whether there is one."""
        return is_immutable_number(self._before.take())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._before == self._before

    def __hash__(self) -> int:
        return hash(self._before)


@contextmanager
def numbers_inserted(besides: Besides, calls: HostCalls) -> Iterator[None]:
    """While active, what stands for such numbers is in their places."""
    real = [(each, each.place.now()) for each in besides.on_host]
    try:
        for before, number in real:
            if is_immutable_number(number):
                found = calls.found(TakesNumber(before), (), before.path)
                calls.by_value(found.expression, found.plain)
                before.place.write(Later(before, (), is_number=True))
        yield
    finally:
        for before, number in real:
            before.place.write(number)
