"""What a traced step leaves behind on the host: put back after every trace, kept once.

A trace runs the step's Python code, and a step is traced more than once. So that every trace sees
what an eager call would see, everything that the step can reach is put back after each (see
`reachable`). What one trace changed, the hooks that a model installs on its first forward, a cache
or a flag of an object, is made to be once the step is captured, as an eager call leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.call import Call
from graphopt.tracing.effects import contents
from graphopt.tracing.effects.contents import Names, ObjectKind
from graphopt.tracing.effects.reachable import reachable
from graphopt.tracing.failures import definition_of
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs, MoreInputs
from graphopt.tracing.interception.nests import parts
from graphopt.tracing.keyed import Keyed, keyed_by_tensors
from graphopt.tracing.outside.places import MISSING, OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.outside.steps import not_repeated
from graphopt.tracing.outside.unrepeated import LeftPlace
from graphopt.tracing.scalars.numbers import SYMBOLIC


@dataclass(frozen=True)
class ObjectChange:
    """One object that held something else after a trace than before."""

    kind: ObjectKind
    changed: Any
    before: Any
    after: Any


@dataclass
class OutsideChanges:
    """What one trace changed outside the graph; truthy where there is anything.

    Attributes:
        changes: of objects that the step can reach.
        constants: `(attributes, name, value)` of objects among the arguments, which every call of
            the captured step sets.
    """

    changes: list[ObjectChange] = field(default_factory=list)
    constants: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def with_originals(self, stands_for: Mapping[int, Any]) -> OutsideChanges:
        """The same with tensors in place of what stood for them in the trace (by id)."""
        changes = [
            replace(change, after=_original(change.after, stands_for)) for change in self.changes
        ]
        return OutsideChanges(changes, self.constants)

    def first_change(self, record: Record) -> tuple[str, SourceLine | None]:
        """What is changed first, and by which line, as far as that was seen."""
        known = [record.unrepeated.written_at(change.changed) for change in self.changes]
        seen = next((each for each in known if each is not None), None)
        if seen is not None:
            return seen
        change = self.changes[0]
        if isinstance(change.changed, Names):
            return change.changed.differing(change.before, change.after), None
        kind = type(change.changed)
        return record.path(change.changed, f"a {kind.__name__}"), None

    def apply(self) -> None:
        """Leave everything as the traced step did."""
        for change in self.changes:
            change.kind.write(change.changed, change.after)
        if self.changes:
            for attributes, name, value in self.constants:
                attributes[name] = value

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While active, everything is as the traced step left it."""
        former = [(of, name, of.get(name, MISSING)) for of, name, _ in self.constants]
        self.apply()
        try:
            yield
        finally:
            for attributes, name, value in former:
                OutsidePlace("item", attributes, name).write(value)
            for change in self.changes:
                change.kind.write(change.changed, change.before)


class HostState:
    """What everything that the step of a call can reach holds when this is made."""

    def __init__(self, call: Call) -> None:
        found = reachable(call.fn, call.leaves)
        self._held = [(kind, holder, kind.read(holder)) for kind, holder in found]
        self._generators = [held for held in self._held if held[0] is contents.GENERATOR]

    def keyed_by_tensors(self) -> list[Keyed]:
        """The dictionaries and sets whose keys are tensors."""
        return list(keyed_by_tensors(self._held))

    def puts_back(self, value: Any) -> bool:
        """Whether `restore` puts an object back."""
        return any(holder is value for _, holder, _ in self._held)

    def restore(self) -> OutsideChanges:
        """Put everything back, and say what had changed."""
        changes = {
            index: ObjectChange(kind, holder, before, kind.read(holder))
            for index, (kind, holder, before) in enumerate(self._held)
            if not kind.same(holder, before)
        }
        for change in changes.values():
            change.kind.write(change.changed, change.before)
        return OutsideChanges([*changes.values()])

    def generator_advanced(self) -> bool:
        """Whether a random number generator is no longer as it was."""
        return any(not kind.same(holder, before) for kind, holder, before in self._generators)


def _original(
    value: Any, stands_for: Mapping[int, Any], within: frozenset[int] = frozenset()
) -> Any:
    """A nest in which tensors are put back into the place of their stand-ins. Containers without
    these, and those that contain themselves, stay what they are."""
    if type(value) not in (list, tuple, frozenset) or id(value) in within:
        return stands_for.get(id(value), value)
    within |= {id(value)}
    found = [_original(each, stands_for, within) for each in value]
    same = all(a is b for a, b in zip(found, value, strict=True))
    return value if same else type(value)(found)


def check_effects(effects: OutsideChanges) -> None:
    """Refuse what cannot be left behind once.

    Raises:
        CaptureError: it is the value of a tensor, a text with one, or a mode of torch.
    """
    for change in effects.changes:
        if change.kind is contents.MODES:
            raise CaptureError(
                "it leaves a mode of torch changed (grad mode, autocast, the default dtype or"
                " deterministic algorithms)",
                hint="set it outside the step, or for a part of the step by a context manager",
            )
        if any(isinstance(value, SYMBOLIC) for value in _flat(change.after)):
            raise CaptureError(
                "it keeps the value of a tensor outside its return value, which would happen at"
                " capture only",
                hint="return the value from the step and keep it outside",
            )


def keeps_plain_values(effects: OutsideChanges) -> bool:
    """Whether numbers or texts are kept that were not there before."""
    for change in effects.changes:
        if change.kind is not contents.GENERATOR:
            before = [value for value in _flat(change.before) if isinstance(value, _PLAIN)]
            after = [value for value in _flat(change.after) if isinstance(value, _PLAIN)]
            if len(after) > len(before) or not set(before).issuperset(after):
                return True
    return False


_PLAIN = (int, float, complex, str, bytes)


def is_told(effects: OutsideChanges) -> bool:
    """Whether containers or plain values changed: what each call may do for itself, unlike an
    object that is made once and kept."""
    for change in effects.changes:
        if change.kind in (contents.LIST, contents.QUEUE, contents.SET, contents.ARRAY):
            return True
        if any(isinstance(value, (*_PLAIN, type(None))) for value in _new_values(change)):
            return True
    return False


def left_by_branches(
    effects: OutsideChanges, record: Record, call: Call
) -> MoreInputs | CaptureError:
    """Why a step that decides by values is not captured as it is. Plain values that it leaves where
    it has read something else, such as a flag, each call is to put there, whichever branch it
    takes; anything else would happen at capture only."""
    told = left_for_each_call(record.unrepeated.left)
    if told is not None:
        return told
    what, line = effects.first_change(record)
    return CaptureError(
        f"it decides by the value of a tensor, and changes {what} outside the model, which"
        " would happen at capture only",
        location=str(line or definition_of(call)),
        hint="do it behind the step, or let a function do it that is called in every step:"
        " graphopt.callback(rows.clear)",
    )


def left_for_each_call(left: Iterable[LeftPlace]) -> MoreInputs | None:
    """Let each call put plain values into places in which a trace leaves them; None where there are
    none."""
    places = [
        CarriedPlace(each.path, each.place, counted=True) for each in left if each.may_be_told
    ]
    return MoreInputs(ImplicitInputs(carried=places)) if places else None


def check_left(effects: OutsideChanges, record: Record) -> None:
    """Values are left behind by the call of a trace alone: none may be lost, as in an object among
    the arguments, which is put back by itself.

    Raises:
        CaptureError: one is lost.
        MoreInputs: a plain one, which each call is to put there.
    """
    changed = {id(change.changed) for change in effects.changes}
    lost = [each for each in record.unrepeated.left if id(each.place.holder) not in changed]
    told = left_for_each_call(lost)
    if told is not None:
        raise told
    for each in lost:
        raise not_repeated(each.path, each.line)


def _new_values(change: ObjectChange) -> Iterator[Any]:
    if change.kind is contents.TABLE:
        before = dict(zip(map(id, change.before[0]), change.before[1], strict=True))
        for key, value in zip(*change.after, strict=True):
            if id(key) not in before or before[id(key)] is not value:
                yield value
    elif change.kind in (contents.CELL, contents.NAMES, contents.BYTES):
        yield from _flat(change.after)


def drawn_from(effects: OutsideChanges) -> str | None:
    """The class of a random number generator that was drawn from or seeded."""
    for change in effects.changes:
        if change.kind is contents.GENERATOR:
            return f"{type(change.changed).__module__}.{type(change.changed).__qualname__}"
    return None


def _flat(value: Any) -> Iterator[Any]:
    """The leaves of a nest, which may be deep and contain itself."""
    return (each for each in parts(value, _is_nest) if not _is_nest(each))


def _is_nest(value: Any) -> bool:
    return isinstance(value, (list, tuple, frozenset))
