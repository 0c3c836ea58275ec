"""A parameter-group setting as a place that a step reads and writes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from graphopt.tracing.inputs.entries import is_number, is_switch
from graphopt.tracing.outside.places import MISSING
from graphopt.tracing.scalars.numbers import SCHEDULED, SYMBOLIC


def may_be_left(key: str, value: Any) -> bool:
    """True if a step may store a value in a setting: a number, a flag, or a tuple of numbers that
    are inputs."""
    if key in SCHEDULED and type(value) is tuple:  # such as `betas`
        return all(map(_is_one, value))
    return is_switch(value) or _is_one(value)


def _is_one(value: Any) -> bool:
    return is_number(value) or isinstance(value, SYMBOLIC)


@dataclass(frozen=True)
class SettingPlace:
    """The place `optimizer.param_groups[group][key]`. The optimizer is not kept alive."""

    optimizer: weakref.ref[Optimizer]
    group: int
    key: str
    kind = "item"

    @classmethod
    def of(cls, optimizer: Optimizer, group: int, key: str) -> SettingPlace:
        """Makes the place of a setting, with a weak reference to the optimizer."""
        return cls(weakref.ref(optimizer), group, key)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for two places of one setting."""
        return ("setting", id(self.optimizer()), self.group, self.key)

    def now(self) -> Any:
        """The current value of the setting, `MISSING` if there is none."""
        optimizer = self.optimizer()
        if optimizer is None or self.group >= len(optimizer.param_groups):
            return MISSING
        return optimizer.param_groups[self.group].get(self.key, MISSING)

    def write(self, value: Any) -> None:
        """Stores a value in the setting; `MISSING` removes it."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        group = optimizer.param_groups[self.group]
        if value is MISSING:
            group.pop(self.key, None)
        else:
            group[self.key] = value
