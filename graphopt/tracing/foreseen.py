"""Settings that schedulers will have set by some place of a step, computed before the step runs.

    optimizer.step(); scheduler.step(); optimizer.step(); if loss < best: …
                                        └─ with the rate that a copy of the scheduler has set

The schedulers themselves step where the program does. So nothing that the graph computes with such
a rate depends on what happens besides it, and the step may decide by it. A scheduler may go by what
the step changes; then each call finds that the two differ, and says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from graphopt import _compat
from graphopt._compat.untraced import untraced
from graphopt.errors import GraphOptError
from graphopt.tracing.host_numbers import is_host_number

_DEPTH = 6
_GIVEN = object()
"""Stands for a number that each call finds for itself."""


class Stepped(NamedTuple):
    """A step of a scheduler, or what the step sets between two of them.

    Attributes:
        step: the function, as it is where no step is traced.
        args: numbers, of which each call may find others.
    """

    scheduler: Any
    step: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class SetInGroup:
    """Sets a setting of a parameter group of a scheduler's optimizer, as the step does.

    Attributes:
        index: which group.
    """

    index: int
    key: str

    def __call__(self, scheduler: Any, value: Any) -> None:
        scheduler.optimizer.param_groups[self.index][self.key] = value

    def repeats(self, other: SetInGroup) -> bool:
        """Whether another trace of the same step has set the same."""
        return self == other


class Foreseen:
    """Gives a setting of a parameter group behind some steps of schedulers, when a call begins.

    Args:
        steps: those before it in the program.
        found: parameter groups as they are while a step is traced, by their identities; empty when
            it is not.
        index: which group of the last scheduler's optimizer.
        item: which part of a tuple; None: the setting is a number.
    """

    def __init__(
        self,
        steps: Sequence[Stepped],
        found: Mapping[int, dict[str, Any]],
        index: int,
        key: str,
        item: int | None,
    ) -> None:
        self._steps = tuple(
            each._replace(args=tuple(_GIVEN if is_host_number(a) else a for a in each.args))
            for each in steps
        )
        self._found = found
        self._index, self._key, self._item = index, key, item

    def __call__(self, *given: float) -> Any:
        """
        Args:
            given: the numbers that the steps are given and each call may find others of.
        """
        return untraced(self._computed, given)

    def _computed(self, given: Sequence[float]) -> Any:
        numbers = iter(given)
        optimizers = [vars(each.scheduler)["optimizer"] for each in self._steps]
        memo: dict[int, Any] = {
            id(each): _compat.StandInOptimizer(each, list(map(self._as_found, each.param_groups)))
            for each in optimizers
        }
        for each in self._steps:
            args = [next(numbers) if arg is _GIVEN else arg for arg in each.args]
            each.step(copy.deepcopy(each.scheduler, memo), *args)
        return self._part(memo[id(optimizers[-1])].param_groups)

    def check(self, scheduler: Any, expected: float) -> None:
        """The schedulers have stepped.

        Args:
            expected: what the step was computed with.

        Raises:
            GraphOptError: they have set something else.
        """
        found = self._part(vars(scheduler)["optimizer"].param_groups)
        if found != expected and not (math.isnan(found) and math.isnan(expected)):
            raise GraphOptError(
                f"a {type(scheduler).__name__} has set {self._key!r} of a parameter group to"
                f" {found!r} in a captured step that was computed with {expected!r}: the scheduler"
                " goes by what the step changes\n  hint:  step it outside the step"
            )

    def _as_found(self, group: dict[str, Any]) -> dict[str, Any]:
        held = self._found.get(id(group), group)
        return {key: _plain(value) for key, value in held.items() if key != "params"}

    def _part(self, groups: Sequence[dict[str, Any]]) -> Any:
        value = groups[self._index][self._key]
        return value if self._item is None else value[self._item]

    def _described(self) -> Any:
        steps = [(id(each.scheduler), each.step, each.args) for each in self._steps]
        return steps, self._index, self._key, self._item

    def repeats(self, other: Foreseen) -> bool:
        """Whether another trace of the same step has asked for the same."""
        return bool(other._described() == self._described())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreseen) and self.repeats(other)

    def __hash__(self) -> int:
        return hash((self._index, self._key, self._item))


def given_to(steps: Sequence[Stepped]) -> list[Any]:
    """The numbers that steps are given and each call may find others of."""
    return [arg for each in steps for arg in each.args if is_host_number(arg)]


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    return value.value if is_host_number(value) else value


def is_foreseeable(scheduler: Any, args: Sequence[Any]) -> bool:
    """Whether a copy of a scheduler can be stepped in its place: all that it holds besides its
    optimizer are numbers, texts and functions, and it is given numbers."""
    if isinstance(scheduler, ReduceLROnPlateau) or not all(map(_is_integer, args)):
        return False
    return all(_is_plain(value, _DEPTH) for value in vars(scheduler).values())


def _is_integer(value: Any) -> bool:
    return type(_plain(value)) is int


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, (Optimizer, FunctionType, BuiltinFunctionType, type)):
        return True
    if value is None or type(value) in (bool, int, float, str):
        return True
    if not depth:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain(each, depth - 1) for each in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(each, depth - 1) for each in value)
    if isinstance(value, partial):
        return _is_plain((value.func, value.args, value.keywords), depth - 1)
    return isinstance(value, LRScheduler) and is_foreseeable(value, ())
