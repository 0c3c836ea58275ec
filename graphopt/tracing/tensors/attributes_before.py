"""Attributes of modules, optimizers and other arguments before a step, and its changes to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.effects.state_writes import note_counted
from graphopt.tracing.inputs.entries import is_number, is_switch
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.interception.replaced_modules import RegisteredTensors
from graphopt.tracing.optimizers.setting_place import may_be_left
from graphopt.tracing.outside.held import is_object
from graphopt.tracing.outside.places import MISSING, OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.tensors.attributes import AttributeChange

_OF_OPTIMIZERS = frozenset({"state", "param_groups", "step"})
"""Attributes of optimizers that the trace itself replaces."""


class AttributesBefore:
    """A snapshot of attributes and parameter-group settings before a traced step.

    Attributes:
        objects: attributes of optimizers and other objects that are no modules.
        tables: attributes of modules and of these, each with what they were.
        groups: what the parameter groups were, each behind its place: see `groups_of`.

    Args:
        by_id: the stand-ins, by the ids of the tensors.
        alone: no other rank runs the same step.
    """

    def __init__(
        self, call: Call, record: OutsideRecord, by_id: Mapping[int, torch.Tensor], alone: bool
    ) -> None:
        self._alone = alone
        modules = list(call.named_submodules())
        objects = list(_plain_objects(call))
        self._registered = [RegisteredTensors(name, module) for name, module in modules]
        self._names = [name for name, _ in (*modules, *objects)]
        self.objects = [attributes for _, attributes in objects]
        self._of_optimizers = {id(vars(each)) for each in call.optimizer_objects()}
        now = [*(vars(module) for _, module in modules), *self.objects]
        self._buffers = [
            (name, table, dict(table))
            for name, table in ((name, _compat.own_buffers(module)) for name, module in modules)
        ]
        self.tables = [(attributes, dict(attributes)) for attributes in now]
        self.groups = [(index, number, dict(group)) for index, number, group in groups_of(call)]
        self._call, self._record, self._by_id = call, record, by_id

    def changes(self) -> Iterator[AttributeChange]:
        """Yields the attributes that the step has changed, as each call changes them."""
        for name, (now, before) in zip(self._names, self.tables, strict=True):
            own = _OF_OPTIMIZERS if id(now) in self._of_optimizers else ()
            for key, value in now.items():
                former = before.get(key, MISSING)
                if key not in own and self._is_left(now, key, former):
                    yield AttributeChange(now, key, f"{name}.{key}".strip("."), former, value)
        for name, table, before in self._buffers:
            for key, value in table.items():
                former = before.get(key, MISSING)
                if value is not former and self._is_put(table, key, former):
                    yield AttributeChange(table, key, f"{name}.{key}".strip("."), former, value)

    def _is_put(self, table: dict[str, Any], key: str, former: object) -> bool:
        """True if each call puts a new or replaced buffer into a module."""
        identity = OutsidePlace("item", table, key).identity
        return not isinstance(former, torch.Tensor) or identity in self._call.besides.replaced

    def _is_left(self, table: dict[str, Any], key: str, former: Any) -> bool:
        """True if each call stores a value in an attribute: another object than before, or one of
        its arguments. A list that torch fills with stand-ins, such as an RNN's weights, does not
        count."""
        value, written = table[key], self._record.has_written(table, key)
        if value is former:
            return written and id(value) in self._record.of_call
        return written or not _stands_for(former, value, self._by_id)

    def left(self) -> Iterator[AttributeChange]:
        """Yields the changed attributes at the end of the step.

        Raises:
            CaptureError: it has registered parameters, buffers or submodules.
        """
        for registered in self._registered:
            registered.refuse_changed(self._record)
        for name, table, before in () if self._alone else self._buffers:
            for key, value in table.items():
                if value is not None and before.get(key) is None:
                    raise CaptureError(
                        f"it registers the buffer {name}.{key}".replace(" .", " ")
                        + ", which other ranks do not know of",
                        hint="register it with its shape and dtype outside the step",
                    )
        yield from self.changes()

    def refuse_deleted(self) -> None:
        """Refuses a step that has deleted an attribute, while the record knows its lines.

        Raises:
            CaptureError: naming the line.
        """
        for name, (now, before) in zip(self._names, self.tables, strict=True):
            for key in (key for key in before if key not in now):
                raise CaptureError(
                    f"it deletes the attribute {name}.{key}".replace(" .", " ")
                    + ", which would happen at capture only",
                    location=self._record.location_of(OutsidePlace("item", now, key)),
                    hint="set it to None",
                )

    def note_counted(self, finder: ImplicitInputFinder) -> None:
        """Tells the finder of numbers in attributes that the step has changed."""
        for table, key, name, before, after, _ in self.changes():
            note_counted(finder, name, OutsidePlace("item", table, key), before, after)

    def counted(self, finder: ImplicitInputFinder) -> list[tuple[int, int, str, Any]]:
        """The parameter-group settings that the step has changed: positions and new values."""
        found = []
        now = [group for _, _, group in groups_of(self._call)]
        if len(now) != len(self.groups):
            raise CaptureError(
                "it adds or removes a parameter group of an optimizer",
                hint="change it outside the step, between two calls",
            )
        for (index, number, old), new in zip(self.groups, now, strict=True):
            changed = [k for k in {**old, **new} if new.get(k, MISSING) is not old.get(k, MISSING)]
            for key in changed:
                if not may_be_left(key, new.get(key, MISSING)):
                    raise CaptureError(
                        f"it changes {key!r} of an optimizer's parameter group",
                        hint="change it outside the step, between two calls",
                    )
                is_one = not is_switch(new[key]) and type(new[key]) is not tuple
                if is_one and is_number(old.get(key)) and not is_host_number(old[key]):
                    finder.count(key)
                found.append((index, number, key, new[key]))
        return found


def _stands_for(before: Any, after: Any, by_id: Mapping[int, torch.Tensor]) -> bool:
    """True if a list or tuple holds stand-ins for the tensors of another."""
    kinds = (list, tuple)
    if not (isinstance(after, kinds) and isinstance(before, kinds) and before):
        return False
    return len(after) == len(before) and all(
        by_id.get(id(_referent(old)), MISSING) is _referent(new)
        for old, new in zip(before, after, strict=True)
    )


def _referent(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def _plain_objects(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields name and attributes of the optimizers and other plain objects among the arguments."""
    for position in (*call.optimizers, *call.constants):
        if position in call.objects.roots:
            continue  # see `effects.argument_changes`
        attributes = getattr(call.leaves[position], "__dict__", None)
        if isinstance(attributes, dict) and not is_object(call.leaves[position]):
            yield call.names[position], attributes


def groups_of(call: Call) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields each distinct parameter group with the numbers of optimizer and group."""
    known: set[int] = set()
    for index, optimizer in enumerate(call.optimizer_objects()):
        for number, group in enumerate(optimizer.param_groups):
            if id(group) not in known:
                known.add(id(group))
                yield index, number, group
