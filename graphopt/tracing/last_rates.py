"""Reads the rates of a scheduler before it steps, as a call finds them when it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphopt.errors import CaptureError
from graphopt.tracing.host_numbers import is_host_number, is_of_numpy
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.source import current_location


class LastRate:
    """Reads one of the rates that a scheduler has set last, when a call begins.

    Args:
        scheduler: whose rates.
        read: its `get_last_lr`, or `get_lr`.
    """

    def __init__(self, scheduler: Any, read: Callable[[Any], list[Any]]) -> None:
        self._scheduler, self._read = scheduler, read

    def __call__(self, index: int) -> Any:
        with _plain_rates(vars(self._scheduler)["optimizer"].param_groups):
            rate = self._read(self._scheduler)[index]
        return rate.value if is_host_number(rate) else rate  # while the step is traced

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LastRate):
            return False
        return other._scheduler is self._scheduler and other._read is self._read

    def __hash__(self) -> int:
        return id(self._scheduler)


@contextmanager
def _plain_rates(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Parameter groups with the rates of this call, of which code that is not traced computes
    others while the step is."""
    traced = [(group, group["lr"]) for group in groups if is_host_number(group["lr"])]
    for group, rate in traced:
        dict.__setitem__(group, "lr", rate.value)
    try:
        yield
    finally:
        for group, rate in traced:
            dict.__setitem__(group, "lr", rate)


def is_rate(value: Any) -> bool:
    """Whether a rate is a number, which each call can read for itself."""
    return isinstance(value, (int, float, *SYMBOLIC)) or is_of_numpy(value)


def not_numbers(scheduler: Any) -> CaptureError:
    """The refusal of a step that reads rates that are tensors, which torch's code computes."""
    return CaptureError(
        f"it reads the rates of a {type(scheduler).__name__}, which are not numbers",
        location=current_location(),
        hint="read them outside the step, or give the optimizer a number for its rate",
    )
