"""What an instruction of a Python function reads from outside the step, and what it writes.

Asked before the instruction is executed, with its operands (`_compat.frames`). Which method is
asked for which instruction says `accesses`.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import CellType, FrameType
from typing import Any

from graphopt._compat.frames import NULL, Operands
from graphopt.host.changes import changes_of
from graphopt.ir.source import SourceLine
from graphopt.tracing.draws.arguments import any_known, plain
from graphopt.tracing.inputs import may_be_input
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside import kept_lists
from graphopt.tracing.outside.accesses import OutsideAccess
from graphopt.tracing.outside.attributes import attribute_place, read_attribute, read_method
from graphopt.tracing.outside.callees import (
    Substitute,
    called_with,
    expanded_call,
    never,
    place_of_callee,
)
from graphopt.tracing.outside.calls import NativeCalls
from graphopt.tracing.outside.later_operands import Gives, LaterOperands
from graphopt.tracing.outside.native import is_large_array, set_by_c
from graphopt.tracing.outside.places import MISSING, OutsidePlace, is_container, is_read
from graphopt.tracing.outside.record import Record

_SLICED = frozenset({list, tuple})
"""Containers part of which is one of their kind."""


_BEGINNING = frozenset({defaultdict, Counter})
"""Dictionaries in which a step may begin to count."""
_METHODS = {"+=": "__iadd__", "|=": "__ior__", "-=": "difference_update"}
"""What operators do with lists, queues and sets."""


class Instructions(LaterOperands):
    """Follows the instructions of observed functions into a record."""

    def __init__(self, record: Record, substitute: Substitute = never) -> None:
        self._record = record
        self._substitute = substitute
        self._calls = NativeCalls(record)

    def before(self, frame: FrameType, step: OutsideAccess) -> None:
        """`frame` is about to execute an instruction."""
        operands = Operands(frame, step.offset)
        code = frame.f_code
        line = SourceLine(code.co_filename, frame.f_lineno, code.co_name)
        handler: Callable[..., None] = getattr(self, step.handler)
        record = self._record
        if step.feeding is None:
            handler(frame, step, operands, line)
            if step.counting:
                record.read_loaded((id(frame), step.offset))
            return
        record.pending = []
        try:
            handler(frame, step, operands, line)
        finally:
            pending, record.pending = record.pending, None
        for each in pending[:-1]:
            record.read(*each)
        if not pending:
            return
        value = pending[-1][0].now()
        if not _may_count(value):
            record.read(*pending[-1])
        else:
            if value is MISSING and type(pending[-1][0].holder) in _BEGINNING:
                record.read(*pending[-1])
            record.loads.add((id(frame), step.feeding), pending[-1])

    def counts(self, frame: FrameType) -> None:
        """A function begins that adds its second argument to its first."""
        line = SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        counter, *added = (frame.f_locals[n] for n in frame.f_code.co_varnames[:2])
        self._record.mutated(counter, line)
        for value in added:
            self._read_contents(frame, value, line)
            if isinstance(value, (list, tuple, set, frozenset, dict, str)):
                for key in value:
                    if key not in counter:
                        self._record.item(counter, key, self._record.path(counter, "Counter"), line)
                    self._calls.store_item(counter, key, line, counting=True)

    def _stored(
        self,
        frame: FrameType,
        step: OutsideAccess,
        place: OutsidePlace | None,
        owner: Any,
        line: SourceLine,
        path: str | None = None,
    ) -> None:
        """A store: of a value made from what was at the same place, or of another."""
        self._calls.store(place, owner, line, self._counts_in(frame, step, place), path)

    def _counts_in(self, frame: FrameType, step: OutsideAccess, place: OutsidePlace | None) -> bool:
        """Whether what is stored in `place` is made of what is there; all else that it is made of
        is read."""
        return self._record.read_loaded((id(frame), step.offset), place)

    # ------------------------------------------------------------------ names

    def _global(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        names, known = frame.f_globals, vars(builtins)
        if step.name in names or step.name not in known:
            self._record.read(OutsidePlace("item", names, step.name), step.name, line)
            return
        self._record.read(OutsidePlace("has", names, step.name), f"{step.name} in globals", line)
        self._record.read(OutsidePlace("item", known, step.name), step.name, line)

    def _name(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        if step.name not in frame.f_locals:
            self._global(frame, step, operands, line)

    def _cell(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        cell = operands.variable(step.argument)
        if isinstance(cell, CellType) and self._record.is_outside(cell):
            self._record.read(OutsidePlace("cell", cell), step.name, line)

    def _set_global(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        names = frame.f_globals
        self._stored(frame, step, OutsidePlace("item", names, step.name), names, line, step.name)

    def _set_cell(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        cell = operands.variable(step.argument)
        if isinstance(cell, CellType):
            self._stored(frame, step, OutsidePlace("cell", cell), cell, line, step.name)

    # ------------------------------------------------------------------ attributes

    def _attribute(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        value = operands.top(1)
        if type(value) is deque and step.name == "maxlen":  # which nothing changes
            self._record.pin(value)
            return
        path = f"{self._record.path(value, _called(frame, value))}.{step.name}"
        read_attribute(self._record, value, step.name, path, line)

    def _super(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        value = super(operands.top(2), operands.top(1))
        read_attribute(self._record, value, step.name, f"super().{step.name}", line)

    def _set_attribute(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        owner = operands.top(1)
        self._stored(frame, step, attribute_place(owner, step.name), owner, line)

    def _import(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        self._record.read(OutsidePlace("item", sys.modules, step.name), step.name, line)

    # ------------------------------------------------------------------ containers

    def _item(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        record, key = self._record, operands.top(1)
        container = record.viewed(operands.top(2))
        other = self._substitute(operator.getitem, (container, key)) if any_known((key,)) else None
        laters = record.laters
        if other is not None and laters is not None and laters.arrays.is_array(container):
            record.contents_read.add(id(container))
            if step.feeding is not None or laters.arrays.is_written(container):
                other = None
        if other is not None:  # the item is found in each call
            operands.put(2, other)
            return
        key = self._exact(operands, 1, plain(key))
        kept = kept_lists.item(record, container, key)
        if kept is not None:
            kept_lists.reads(record, kept, container, f"{{}}[{key}]", line)
            other = self._substitute(operator.getitem, (container, key))
            if other is not None:
                operands.put(2, other)
            return
        trimmed = isinstance(key, slice) and self._is_trimmed(frame, container)
        if record.laters is not None and not trimmed:
            item = record.laters.item(container, operands.top(1), line, step.feeding is not None)
            if item is not None:
                operands.put(2, Gives(item))
                operands.put(1, 0)
                return
        if not record.is_outside(container) or trimmed:
            return
        path = record.path(container, _called(frame, container))
        if isinstance(container, dict) or (
            isinstance(container, (list, tuple)) and isinstance(key, int)
        ):
            self._existing_item(container, key, path, line)
        elif is_read(container):
            record.contents(container, path, line)
        else:
            read_method(record, type(container), "__getitem__", line)

    def _slice(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        container, key = operands.top(3), slice(operands.top(2), operands.top(1))
        if self._is_trimmed(frame, container):
            return
        laters = self._record.laters
        item = None if laters is None else laters.item(container, key, line)
        if item is None:
            self._read_contents(frame, container, line)
        else:
            operands.put(3, Gives(item))

    def _is_trimmed(self, frame: FrameType, value: Any) -> bool:
        """Whether a part of a value takes its place, and goes nowhere else."""
        loaded = self._record.loads.places(id(frame))
        return type(value) in _SLICED and any(place.now() is value for place in loaded)

    def _existing_item(self, container: Any, key: Any, path: str, line: SourceLine) -> None:
        try:
            container[key] if not isinstance(container, dict) else hash(key)
        except (IndexError, TypeError):
            return  # the instruction raises as well
        self._record.item(container, key, path, line)
        makes = isinstance(container, defaultdict) and container.default_factory is not None
        if makes and key not in container:  # it is there afterwards
            self._record.mutated(container, line)

    def _set_item(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        container, key = operands.top(2), self._exact(operands, 1, plain(operands.top(1)))
        if not self._record.is_outside(container):
            return
        other = self._record.item_setter(container, operands.top(1))
        if other is not None:
            operands.put(2, other)
            return
        laters = self._record.laters
        if laters is not None:
            other = laters.arrays.setter(container, operands.top(1), operands.top(3), line)
            if other is not None:
                operands.put(2, other)
                return
        if not is_container(container):
            if set_by_c(container):
                self._record.unrepeated.add(
                    self._record.path(container, _called(frame, container)), line
                )
            return
        if self._record.replaces(container, key, operands.top(3)):
            return
        self._watch(frame, container, line)
        place = OutsidePlace("item", container, key)
        self._calls.store_item(container, key, line, self._counts_in(frame, step, place))

    def _delete_item(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        container, key = operands.top(2), plain(operands.top(1))
        if is_container(container):
            self._record.mutated(container, line, changes_of("__delitem__", [key]))

    def _contents(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        self._read_contents(frame, operands.top(1), line)

    def _items(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        """The step gets the items, and what it reads in them is seen."""
        texts = isinstance(operands.top(1), str)  # of other values it gets each one as it is
        if not self._stands_later(operands, 1, line, texts):
            self._read_contents(frame, operands.top(1), line, nested=False)

    def _two(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        laters = self._record.laters
        if laters is not None and (step.name == "%" or step.instruction == "BINARY_MODULO"):
            left = laters.percent(operands.top(2), operands.top(1), line)
            if left is not None:
                operands.put(2, left)
                return
        for place in (1, 2):
            if not self._stands_later(operands, place, line, texts=step.handler == "_compared"):
                self._read_contents(frame, operands.top(place), line)

    def _in_place(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        changed, value = operands.top(2), operands.top(1)
        laters = self._record.laters
        if laters is not None:
            other = laters.arrays.changer(changed, step.name, value, line)
            if other is not None:
                operands.put(2, other)
                return
        self._read_contents(frame, value, line)
        if isinstance(changed, (list, dict, set, deque)):
            self._record.read_container(id(frame), changed)
            self._record.mutated(changed, line, changes_of(_METHODS.get(step.name, ""), [value]))
        else:
            self._watch(frame, changed, line)
            self._read_contents(frame, changed, line)

    def _watch(self, frame: FrameType, value: Any, line: SourceLine) -> None:
        if is_large_array(value) and self._record.is_outside(value):
            self._record.unrepeated.watches(
                value, self._record.path(value, _called(frame, value)), line
            )

    def _same_object(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        self._pin_both(operands)
        if operands.top(1) is not operands.top(2):
            self._record.compares(operands.top(1), operands.top(2), line)

    def _pin_both(self, operands: Operands) -> None:
        if operands.top(1) is not None and operands.top(2) is not None:
            self._record.pin(operands.top(1))
            self._record.pin(operands.top(2))

    def _compared(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        self._two(frame, step, operands, line)
        if not (is_container(operands.top(1)) or is_container(operands.top(2))):
            self._pin_both(operands)

    def _contains(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        laters, container = self._record.laters, operands.top(1)
        if isinstance(container, str) and self._stands_later(operands, 1, line, texts=True):
            return
        if laters is not None and laters.is_kept(container):
            self._stands_later(operands, 1, line)
            return
        if isinstance(container, (list, tuple)) and self._stands_later(operands, 2, line, True):
            return
        key = self._exact(operands, 2, plain(operands.top(2)))
        self._record.pin(operands.top(2))
        self._calls.contains(operands.top(1), key, line)

    def _truth(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        value = operands.top(1)
        if is_container(value) and self._record.is_outside(value):
            path = self._record.path(value, _called(frame, value))
            bool(self._record.asks_length(value, path, line))

    def _next(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        value = operands.top(1)
        self._record.iterator(value, self._record.path(value, _called(frame, value)), line)

    def _class_pattern(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        names, kind, value = operands.top(1), operands.top(2), operands.top(3)
        positional = getattr(kind, "__match_args__", ())[: step.argument]
        for name in (*positional, *names):
            path = f"{self._record.path(value, _called(frame, value))}.{name}"
            read_attribute(self._record, value, name, path, line)

    def _read_contents(
        self, frame: FrameType, value: Any, line: SourceLine, nested: bool = True
    ) -> None:
        record = self._record
        value = record.viewed(value)
        if is_read(value) and record.is_outside(value):
            record.read_container(id(frame), value)
            record.contents(value, record.path(value, _called(frame, value)), line, nested)

    # ------------------------------------------------------------------ calls

    def _call(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        callee, args = called_with(step, operands)
        for each in args:
            if is_container(each):
                self._record.read_container(id(frame), each)
        other = self._done_later(callee, args, line, step.discarded)
        if other is not None:
            operands.put(place_of_callee(step, operands), other)
            return
        args = self._taken(callee, args, step, operands)
        self._calls.call(callee, args, line, step.discarded)
        other = self._substitute(callee, args)
        if other is not None:
            operands.put(place_of_callee(step, operands), other)

    def _prepare_call(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        """Python 3.11 takes bound methods apart before the call."""
        if operands.top(step.argument + 2) is NULL:
            self._calls.method(operands.top(step.argument + 1), line)

    def _call_expanded(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        self._spread(step, operands)
        place, args, given = expanded_call(step, operands)
        callee = operands.top(place)
        self._read_contents(frame, args, line)
        given = [*(args if isinstance(args, (tuple, list)) else ()), *given]
        later = self._done_later(callee, given, line, step.discarded)
        if later is not None:
            operands.put(place, later)
            return
        if self._record.laters is not None:
            self._record.laters.not_taken(callee, given)
        self._calls.call(callee, given, line)
        other = self._substitute(callee, given)
        if other is not None:
            operands.put(place, other)


def _called(frame: FrameType, value: Any) -> str:
    """What the function calls an object."""
    for name, local in frame.f_locals.items():
        if local is value:
            return name
    return type(value).__name__


def _may_count(value: Any) -> bool:
    """Whether an input of a graph may be what a place holds in which a step counts; or a list whose
    end takes its place. Others are read: operators take tensors, and a text that grows is another
    one in each call."""
    kinds = (list, deque, *SYMBOLIC)
    return value is MISSING or may_be_input(value) or isinstance(value, kinds)
