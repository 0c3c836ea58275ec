"""The state that each host callback of a traced step may read: the step's writes before it.

    self.n += 1
    graphopt.callback(lambda: print(self.n))      may look for what the step has set
    graphopt.callback(losses.append, loss)        may not

What a function can reach is what its closure, its arguments and the globals that it names lead to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from graphopt._compat.own_tracing import without_overrides
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.host.held import HeldByFunction
from graphopt.host.seen import EarlierWrite, StaleValue, UsedPlace
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line
from graphopt.tracing.effects.reads_behind_callbacks import ReadsBehindCallbacks
from graphopt.tracing.optimizers.setting_place import SettingPlace
from graphopt.tracing.outside.places import MISSING, OutsidePlace, is_value, same
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.results.signature import Signature
from graphopt.tracing.rollback.nests import Path
from graphopt.tracing.rollback.reachable import ReachableObjects, reached_from

Tables = Sequence[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes of objects, with what they were when the step began."""


class HostView:
    """Tracks what one trace has written before each host callback.

    Args:
        tables: attributes of modules, optimizers and other objects among the arguments.
        settings: parameter groups as the step found them, each with its place.

    Attributes:
        given: lists and dictionaries among the arguments, with their paths.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        record: OutsideRecord,
        tables: Tables,
        settings: Sequence[tuple[int, int, dict[str, Any]]],
    ) -> None:
        self._record, self._tables, self._settings = record, tables, settings
        self._optimizers = optimizers
        self._calls: list[tuple[HostCall, ReachableObjects, SourceLine | None]] = []
        self._groups: list[Any] = []
        self.given: Sequence[tuple[Any, Path]] = ()

    # ------------------------------------------------------------------ calls

    def note(self, call: HostCall) -> None:
        """Records that the step calls a host callback."""
        if self._record.behind is None:
            self._record.behind = ReadsBehindCallbacks(self._record.times_written)
        self._record.behind.calls()
        call.take_apart(self._is_own_nest)
        with without_overrides():
            reach = reached_from(call.fn, call.constants_in())
        self._calls.append((call, reach, current_user_line()))
        call.held = self._held(call)
        for path, place, before in self._changed():
            value = place.now()
            if not same(value, before) and self._finds(reach, place):
                plain = value is MISSING or is_value(value) or self._record.is_outside(value)
                call.found.append(EarlierWrite(place, path, value if plain else StaleValue(path)))
                self._pin(place)

    def _is_own_nest(self, value: Any) -> bool:
        """True if a value is a list, dictionary or tuple that the step has made."""
        if type(value) not in (list, dict, tuple):
            return False
        given = any(each is value for each, _ in self.given)
        return not given and not self._record.is_outside(value)

    def _held(self, call: HostCall) -> HeldByFunction | None:
        """The step's own values that a callback's function and arguments hold."""
        given = {id(value): (value, path) for value, path in self.given}
        held = HeldByFunction(self._is_used, given)
        for value in (call.fn, *call.constants_in()):
            held.add(value)
        for part in call.constants_in(rebuilt=True):
            self._record.pin(part)
        held.finish()
        return held or None

    def _is_used(self, value: Any) -> bool:
        """True if a callback's object existed before the step, so that each call passes the same
        one."""
        self._record.pin(value)
        return self._record.is_outside(value)

    def _finds(self, reach: ReachableObjects, place: Any) -> bool:
        """True if a callback may read the value in a place."""
        if not isinstance(place, OutsidePlace):
            groups = self._groups or self._record.real_groups.values()
            return reach.has(place.optimizer()) or any(map(reach.has, groups))
        namespace = self._record.is_namespace(place.holder)
        return reach.has(place.holder) or (namespace and reach.names(place.holder, place.key))

    def steps(self, optimizer: Any) -> None:
        """Records that the step steps an optimizer, which reads its settings."""
        behind, line = self._record.behind, current_user_line()
        if behind is None or line is None:
            return
        for index, number, before in self._settings:
            if self._optimizers[index] is not optimizer:
                continue
            for key, value in optimizer.param_groups[number].items():
                if key != "params" and value is before.get(key, MISSING):
                    place = SettingPlace.of(optimizer, number, key)
                    path = f"{key!r} of a parameter group"
                    behind.reads(place, value, path, line)

    def _changed(self) -> Iterator[tuple[str, Any, Any]]:
        """The places that the step has changed so far, with names and former values."""
        for written in self._record.written_places():
            yield written.path, written.place, written.before
        optimizers = {id(vars(optimizer)) for optimizer in self._optimizers}
        for table, before in self._tables:
            for key, value in table.items() if id(table) not in optimizers else ():
                if value is not before.get(key, MISSING):  # torch's own code writes unseen
                    path = f"the attribute {key}"
                    yield path, OutsidePlace("item", table, key), before.get(key, MISSING)
        for index, number, before in self._settings:
            optimizer = self._optimizers[index]
            for key, value in optimizer.param_groups[number].items():
                if value is not before.get(key, MISSING):
                    path = f"{key!r} of a parameter group"
                    place = SettingPlace.of(optimizer, number, key)
                    yield path, place, before.get(key, MISSING)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Ends the trace while its optimizers still have its parameter groups."""
        self._groups = list(self._record.real_groups.values())

    def settle(self, signature: Signature) -> None:
        """Ends the trace: gives each callback the places that its function must not change."""
        left: list[tuple[str, Any]] = [
            *((f"the attribute {each.name}", each.place) for each in signature.attributes),
            *((f"the item or attribute {each.place.key}", each.place) for each in signature.placed),
        ]
        for setting in signature.settings:
            place = SettingPlace.of(self._optimizers[setting.optimizer], setting.group, setting.key)
            left.append((f"{setting.key!r} of a parameter group", place))
        changed = [container.path for container in signature.containers]
        for number, (call, reach, line) in enumerate(self._calls):
            self._refuse_changed(call, line, changed)
            sets = (UsedPlace(place, path, "sets") for path, place in left)
            used = [*self._read_behind(number), *sets]
            call.watched = [each for each in used if self._may_change(reach, each.place)]
            for each in call.watched:
                self._pin(each.place)
        self._calls.clear()
        self._groups.clear()
        self._record.behind = None
        self._tables, self._settings, self.given = (), (), ()

    def _pin(self, place: Any) -> None:
        """Requires the object that holds a place to be the same one in each call."""
        if isinstance(place, OutsidePlace):
            self._record.pin(place.holder)
            self._record.pin(self._record.owner(place.holder))

    def _may_change(self, reach: ReachableObjects, place: Any) -> bool:
        """True if a callback may write to a place."""
        if self._finds(reach, place):
            return True
        return isinstance(place, OutsidePlace) and reach.sets(place.holder, place.key)

    def _refuse_changed(
        self, call: HostCall, line: SourceLine | None, changed: Sequence[Sequence[Any]]
    ) -> None:
        held = [tuple(path) for _, path in call.held.of_trace.values()] if call.held else []
        if any(each == tuple(path)[: len(each)] for each in held for path in changed):
            raise CaptureError(
                "a function given to graphopt.callback holds a list or dictionary among the step's"
                " arguments, which the step changes as well",
                location=line,
                hint="give the function what it needs of it, or let it change another one",
            )

    def _read_behind(self, number: int) -> Iterator[UsedPlace]:
        behind = self._record.behind
        for place, path, line in behind.call(number) if behind is not None else ():
            yield UsedPlace(place, path, f"reads behind the call: {line.file}:{line.line}")
