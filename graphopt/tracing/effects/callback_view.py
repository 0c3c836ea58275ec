"""What a traced step has left outside when it calls a function on the host (`graphopt.host.seen`).

    self.n += 1
    graphopt.callback(lambda: print(self.n))      reaches self: is given self.n, and puts it there
    graphopt.callback(losses.append, loss)        reaches nothing that the step has changed

Only what a function can reach from its closure, its arguments and the globals that it names is put
there for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.untraced import without_overrides
from graphopt.errors import CaptureError
from graphopt.host import HostCall
from graphopt.host.held import FoundObject, Given, HeldByFunction
from graphopt.host.seen import GivenValue, LeftThere, LeftValue, LiveValue, ReadBehind
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line
from graphopt.tracing.call import Call
from graphopt.tracing.effects.argument_changes import GivenContainers
from graphopt.tracing.effects.reachable import Reach, reached_from
from graphopt.tracing.effects.written_values import written_value
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.optimizers.setting_place import SettingPlace
from graphopt.tracing.outside.behind import Behind
from graphopt.tracing.outside.moving import is_object
from graphopt.tracing.outside.places import MISSING, OutsidePlace, same
from graphopt.tracing.outside.record import Record
from graphopt.tracing.results.signature import Constant, Signature
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.substitute import Traced

Tables = Sequence[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes of objects, with what they were when the step began."""


class HostView:
    """Follows what one trace leaves outside, for the functions that it calls on the host.

    Args:
        tables: attributes of modules, optimizers and other objects among the arguments.
        settings: parameter groups as the step found them, each with its place.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        traced: Traced,
        record: Record,
        tables: Tables,
        settings: Sequence[tuple[int, int, dict[str, Any]]],
    ) -> None:
        self._record, self._tables = record, tables
        self._optimizers = call.optimizer_objects()
        self._settings = settings
        self._live = {id(traced.by_id[id(entry.tensor)]): entry for entry in inputs.module_tensors}
        self._calls: list[tuple[HostCall, Reach]] = []
        self._lines: list[SourceLine | None] = []
        self._objects: dict[int, FoundObject] = {}
        self._known: dict[Any, tuple[int, Any, int]] = {}
        self.given = GivenContainers((), {})
        self._before: dict[Any, tuple[Any, Any]] = {}
        self._stamps = 0
        self._transient: set[Any] = set()
        self._last: dict[Any, int] = {}
        self._groups: list[Any] = []

    # ------------------------------------------------------------------ calls

    def note(self, call: HostCall) -> list[Any]:
        """Let a call know what its function finds; returns the values that it is given for that."""
        if self._record.behind is None:
            self._record.behind = Behind(self._record.times_written)
        self._record.behind.calls()
        with without_overrides():
            reach = reached_from(call.fn, call.constants)
        call.number = len(self._calls)
        self._calls.append((call, reach))
        self._lines.append(current_user_line())
        call.held = self._held(call)
        given: list[Any] = []
        for place, holder, before in self._changed():
            value = place.now()
            real = self._record.real_groups.get(id(holder), holder)
            if reach.has(holder) or reach.has(real) or self._record.is_namespace(holder):
                left = self._left(value, given)
                if left is not None:
                    stamp = self._stamp(place, value)
                    self._before.setdefault(place.identity, (place, before))
                    self._record.pin(holder)
                    self._record.pin(self._record.owner(holder))
                    call.outside.left.append(LeftThere(place, left, stamp))
        return given

    def _held(self, call: HostCall) -> HeldByFunction | None:
        """What the function of a call, and what it is given, hold of the step's own."""
        given = {id(value): Given(path) for value, path in self.given.paths()}
        held = HeldByFunction(self._is_used, given, self._found)
        held.add(call.fn)
        for argument in call.constants:
            held.add(argument)
        for part in call.parts_of_nests:
            self._record.pin(part)
        held.finish()
        return held or None

    def _is_used(self, value: Any) -> bool:
        """Whether an object of a call was there before the step: each call uses this very one."""
        self._record.pin(value)
        return self._record.is_outside(value)

    def _found(self, value: Any) -> FoundObject | None:
        """An object outside, where all that it does to the step is seen: each call may find another
        one in its place."""
        if not is_object(value) or not self._record.is_outside(value):
            return None
        return self._objects.setdefault(id(value), FoundObject(value))

    def steps(self, optimizer: Any) -> None:
        """The step steps an optimizer, which reads its settings."""
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

    def _changed(self) -> Iterator[tuple[Any, Any, Any]]:
        """The places that the step has changed so far, each with its holder and what was there."""
        for written in self._record.written_places():
            yield written.place, written.place.holder, written.before
        for table, before in self._tables:
            for key, value in table.items():
                changed = value is not before.get(key, MISSING)
                place = OutsidePlace("item", table, key)
                known = self._record.has_written(table, key) or place.identity in self._before
                if changed or known:  # torch's own code writes unseen
                    yield place, table, before.get(key, MISSING)
        for index, number, before in self._settings:
            optimizer = self._optimizers[index]
            group = optimizer.param_groups[number]
            for key, value in group.items():
                setting = SettingPlace.of(optimizer, number, key)
                changed = value is not before.get(key, MISSING) or setting.identity in self._before
                if changed:
                    yield setting, group, before.get(key, MISSING)

    def _left(self, value: Any, given: list[Any]) -> LeftValue | None:
        """What stands for a value; None where it cannot be made in each call."""
        if value is MISSING or self._record.is_outside(value):
            return LeftValue(None, (value,))
        made = written_value(self._record, value, of_call=False)
        if made is None:
            return None
        leaves, spec = _compat.tree_flatten(made)
        marks = [self._leaf(leaf, given) for leaf in leaves]
        return LeftValue(None if spec == _compat.ONE_VALUE else spec, tuple(marks))

    def _leaf(self, leaf: Any, given: list[Any]) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        if not isinstance(leaf, (torch.Tensor, *SYMBOLIC)):
            return leaf
        entry = self._live.get(id(leaf))
        if entry is not None:
            return LiveValue(entry.tensor, entry.live)
        given.append(leaf)
        return GivenValue(len(given) - 1)

    def _stamp(self, place: Any, value: Any) -> int:
        times = self._record.times_written.get(place.identity, 0)
        known = self._known.get(place.identity)
        if known is None or known[0] != times or known[1] is not value:
            self._stamps += 1
            self._known[place.identity] = (times, value, self._stamps)
        return self._known[place.identity][2]

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The step is over, and all that it leaves is still there."""
        for identity, (place, before) in self._before.items():
            value = place.now()
            self._last[identity] = self._stamp(place, value)
            if same(value, before):
                self._transient.add(identity)
        self._known.clear()
        self._before.clear()
        self._groups = list(self._record.real_groups.values())

    def settle(self, signature: Signature) -> None:
        """Let each call know what its function finds: what each call of the step leaves there, or
        takes back; and what is read behind it."""
        signature.stamps = self._last
        signature.found_by_functions = list(self._objects.values())
        taken = {each.place.identity for each in signature.placed}
        taken |= {each.place.identity for each in signature.attributes}
        for setting in signature.settings:
            optimizer = self._optimizers[setting.optimizer]
            taken.add(SettingPlace.of(optimizer, setting.group, setting.key).identity)
        signature.restored = {k: v for k, v in self._last.items() if k in self._transient - taken}
        taken |= self._transient
        changed = [container.change.path for container in signature.containers]
        for number, (call, reach) in enumerate(self._calls):
            self._refuse_changed(call, self._lines[number], changed)
            outside = call.outside
            outside.left = [each for each in outside.left if each.place.identity in taken]
            outside.read = list(self._read_behind(number, reach))
        self._calls.clear()
        self._groups.clear()
        self._record.behind = None
        self._tables, self._settings, self._live = (), (), {}
        self.given = GivenContainers((), {})

    def _refuse_changed(
        self, call: HostCall, line: SourceLine | None, changed: Sequence[Sequence[Any]]
    ) -> None:
        held = call.held.of_trace.values() if call.held else ()
        if any(each.path == tuple(path)[: len(each.path)] for each in held for path in changed):
            raise CaptureError(
                "a function given to graphopt.callback holds a list or dictionary among the step's"
                " arguments, which the step changes as well",
                location=None if line is None else str(line),
                hint="give the function what it needs of it, or let it change another one",
            )

    def _read_behind(self, number: int, reach: Reach) -> Iterator[ReadBehind]:
        behind = self._record.behind
        if behind is None:
            return
        for place, path, line in behind.call(number):
            holder = place.holder if isinstance(place, OutsidePlace) else place.optimizer()
            of_optimizer = not isinstance(place, OutsidePlace)
            found = reach.has(holder) or (of_optimizer and any(map(reach.has, self._groups)))
            if found or (not of_optimizer and reach.sets(holder, place.key)):
                self._record.pin(holder)
                self._record.pin(self._record.owner(holder))
                yield ReadBehind(place, path, f"{line.file}:{line.line}")
