"""Guards on the optimizers that a step is given or uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from operator import is_
from typing import Any

from torch.optim import Optimizer

from graphopt.guards.snapshots.snapshot import StateSnapshot
from graphopt.guards.values import is_plain, same_constant
from graphopt.tracing.inputs.entries import is_number
from graphopt.tracing.scalars.numbers import SCHEDULED

_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Entries that learning rate schedulers keep in parameter groups, and optimizers never read."""

_OF_OPTIMIZERS = frozenset(
    {"param_groups", "state", "defaults", "_opt_called", "_step_count",
     "_need_device_dtype_check_for_fused"}
)  # fmt: skip
"""Attributes of optimizers that have guards of their own, or are bookkeeping of torch's."""


class OptimizerGuard:
    """Guard on one optimizer: groups, parameters, unscheduled settings and hooks. Details are
    checked only if something may have changed.

    Args:
        counts: settings that the step itself counts up.
        passed_over: attributes that are looked at elsewhere.

    Attributes:
        unchanged: what there was when it was looked at last.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        counts: frozenset[str] = frozenset(),
        passed_over: Collection[str] = (),
    ) -> None:
        self.name, self.counts = name, counts
        self.type = type(optimizer)
        self._passed_over = _OF_OPTIMIZERS.union(passed_over)
        self.attributes = self._attributes(optimizer)
        self.groups = [
            (list(group["params"]), _expected(group, counts)) for group in optimizer.param_groups
        ]
        self._see(optimizer)

    def mismatch(self, optimizer: Optimizer, known: bool = False) -> str | None:
        """Describes what changed, or returns None.

        Args:
            known: `unchanged` holds.
        """
        if self._is_seen(optimizer) and (known or self.unchanged.holds()):
            return None
        reason = self._change(optimizer)
        if reason is None:
            self._see(optimizer)
        return reason

    def _change(self, optimizer: Optimizer) -> str | None:
        if type(optimizer) is not self.type:
            return f"{self.name} became a {type(optimizer).__name__}"
        attributes = self._attributes(optimizer)
        if attributes != self.attributes:
            key = _first_difference(attributes, self.attributes)
            return f"{self.name}.{key} changed"
        if len(optimizer.param_groups) != len(self.groups):
            return f"{self.name} has {len(optimizer.param_groups)} parameter groups now"
        for index, (params, settings) in enumerate(self.groups):
            group = optimizer.param_groups[index]
            live = group["params"]
            if len(live) != len(params) or not all(map(is_, live, params)):
                return f"the members of {self.name}.param_groups[{index}] changed"
            now = _expected(group, self.counts)
            if now != settings:
                key = _first_difference(now, settings)
                return f"{self.name}.param_groups[{index}][{key!r}] became {group.get(key)!r}"
        return None

    def _attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the attributes to compare, hooks and functions in place of methods included."""
        of = vars(optimizer).items()
        return {key: _identity(value) for key, value in of if key not in self._passed_over}

    def _see(self, optimizer: Optimizer) -> None:
        """Takes a snapshot of the state that `_change` compares."""
        attributes, self.unchanged = vars(optimizer), StateSnapshot()
        self._varying: list[tuple[dict[str, Any], str]] = []
        self._seen = weakref.ref(optimizer), attributes
        self.unchanged.has_size(attributes)
        for key, value in attributes.items():
            if key not in self._passed_over:
                self.unchanged.has_object(attributes, key, value)
                if isinstance(value, dict):
                    self.unchanged.has_objects(value)
        self.unchanged.has(attributes, "param_groups", optimizer.param_groups)
        self.unchanged.has_items(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._see_group(group)
        self._values = self._varying_now()
        self._kinds = self._kinds_of(self._values)

    def _see_group(self, group: dict[str, Any]) -> None:
        self.unchanged.has_size(group)
        self.unchanged.has(group, "params", group["params"])
        self.unchanged.has_items(group["params"])
        for key, value, varies in _settings(group, self.counts):
            if varies:
                self._varying.append((group, key))
            else:
                self.unchanged.has_object(group, key, value)

    def _is_seen(self, optimizer: Optimizer) -> bool:
        """True if it is the optimizer checked last, and scheduled settings still are numbers."""
        reference, attributes = self._seen
        if reference() is not optimizer or type(optimizer) is not self.type:
            return False
        try:
            now = self._varying_now()
        except KeyError:
            return False
        if not all(map(is_, now, self._values)):
            if self._kinds_of(now) != self._kinds:
                return False
            self._values = now
        return vars(optimizer) is attributes

    def _varying_now(self) -> list[Any]:
        return [group[key] for group, key in self._varying]

    def _kinds_of(self, values: list[Any]) -> list[Any]:
        return [_kind(key, value) for (_, key), value in zip(self._varying, values, strict=True)]


_NUMBER = object()
"""A placeholder that stands for any number."""


class _Expected:
    """A value to compare others with: plain ones by value, others by identity. These are kept alive
    only if weak references to them are impossible."""

    def __init__(self, value: Any) -> None:
        self._plain = is_plain(value)
        self._get: Callable[[], Any] = lambda: value
        if not self._plain:
            with suppress(TypeError):
                self._get = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Expected) or self._plain is not other._plain:
            return False
        value = self._get()
        return (self._plain or value is not None) and same_constant(value, other._get())

    __hash__ = None  # type: ignore[assignment]


def _identity(value: Any) -> Any:
    """Returns the key by which a value is compared; for hooks, their contents."""
    if isinstance(value, dict):
        return [*value.keys(), *map(_Expected, value.values())]
    if hasattr(value, "__func__"):  # a method, which is made anew when it is read
        return _Expected(value.__func__), _Expected(value.__self__)
    return _Expected(value)


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    return next(k for k in (*a, *b) if k not in a or k not in b or a[k] != b[k])


def _settings(group: dict[str, Any], counts: frozenset[str]) -> Iterator[tuple[str, Any, bool]]:
    """Yields the settings of a group, each with if a graph is specialized only on its type.

    Bookkeeping of schedulers (`initial_lr`, `max_lr`, …) is not read by optimizers.
    """
    for key, value in group.items():
        if key != "params" and key not in _OF_SCHEDULERS:
            yield key, value, key in SCHEDULED or (key in counts and is_number(value))


def _expected(group: dict[str, Any], counts: frozenset[str]) -> dict[str, Any]:
    """Returns the group settings that the graph is specialized on; scheduled numbers by type
    only."""
    return {
        key: _kind(key, value) if varies else _Expected(value)
        for key, value, varies in _settings(group, counts)
    }


def _kind(key: str, value: Any) -> Any:
    if key not in SCHEDULED:
        return type(value)
    return list(map(_scheduled, value)) if isinstance(value, tuple) else _scheduled(value)


def _scheduled(value: Any) -> Any:
    """Returns the key of a scheduled setting: the type for numbers, which are inputs, else the
    value."""
    return _NUMBER if is_number(value) else _Expected(value)
