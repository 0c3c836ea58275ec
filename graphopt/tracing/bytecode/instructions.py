"""Handlers for bytecode instructions: each records what one reads or writes outside the step.

Asked before the instruction is executed, with its operands (`_compat.frames`). Which method is
asked for which instruction says `accesses`.
"""

from __future__ import annotations

import builtins
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, FrameType
from typing import Any

from graphopt import _compat
from graphopt._compat.frames import NULL
from graphopt.ir.source import SourceLine
from graphopt.tracing.bytecode.accesses import OutsideAccess
from graphopt.tracing.bytecode.attributes import (
    attribute_place,
    read_attribute,
    read_method,
    read_setting,
)
from graphopt.tracing.bytecode.callees import NAMED_CALLS, Instruction, instruction_of
from graphopt.tracing.bytecode.calls import NativeCalls
from graphopt.tracing.bytecode.functions import followed, is_called_by
from graphopt.tracing.bytecode.inner_calls import called_within
from graphopt.tracing.bytecode.native import set_by_c
from graphopt.tracing.interception.class_questions import ClassProxy, class_in_trace, is_of_trace
from graphopt.tracing.outside.places import OutsidePlace, is_container, is_read
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.calls import SubstitutedCalls
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.rollback.nests import leaves_in
from graphopt.tracing.scalars.host_numbers import is_host_number, plain
from graphopt.tracing.scalars.numbers import SYMBOLIC

_BY_NAME = frozenset({getattr, hasattr, setattr, vars})
_UNLIKE_NONE = frozenset({list, tuple, dict, set, deque, OrderedDict, defaultdict, Counter})
"""Containers that equal no None, whatever is in them."""


class Instructions:
    """Records the outside accesses of observed functions' instructions."""

    def __init__(self, record: OutsideRecord, substitute: SubstitutedCalls) -> None:
        self._record = record
        self._substitute = substitute
        self._calls = NativeCalls(record)

    def before(self, frame: FrameType, step: OutsideAccess) -> None:
        """Handles the instruction that `frame` executes next."""
        handler: Callable[[Instruction], None] = getattr(self, step.handler)
        handler(instruction_of(frame, step))

    def counts(self, frame: FrameType) -> None:
        """Records that a function starts which adds its second argument to its first, in place."""
        line = SourceLine.of(frame)
        counter, *added = (frame.f_locals[n] for n in frame.f_code.co_varnames[:2])
        self._record.mutated(counter, line)
        for value in added:
            self._read_contents(frame, value, line)
            if isinstance(value, (list, tuple, set, frozenset, dict, str)):
                for key in value:
                    self._record.item(counter, key, self._record.path(counter, "Counter"), line)
                    self._calls.store_item(counter, key, line)

    # ------------------------------------------------------------------ names

    def _global(self, at: Instruction) -> None:
        names, name = at.frame.f_globals, at.step.name
        if name not in names and name in vars(builtins):
            self._record.read(OutsidePlace("has", names, name), f"{name} in globals", at.line)
            names = vars(builtins)
        self._record.read(OutsidePlace("item", names, name), name, at.line)

    def _name(self, at: Instruction) -> None:
        if at.step.name not in at.frame.f_locals:
            self._global(at)

    def _cell(self, at: Instruction) -> None:
        cell = at.variable(at.step.argument)
        if isinstance(cell, CellType) and self._record.is_outside(cell):
            self._record.read(OutsidePlace("cell", cell), at.step.name, at.line)

    def _set_global(self, at: Instruction) -> None:
        names, name = at.frame.f_globals, at.step.name
        self._calls.store(OutsidePlace("item", names, name), names, at.line, name)

    def _set_cell(self, at: Instruction) -> None:
        cell = at.variable(at.step.argument)
        if isinstance(cell, CellType):
            self._calls.store(OutsidePlace("cell", cell), cell, at.line, at.step.name)

    # ------------------------------------------------------------------ attributes

    def _attribute(self, at: Instruction) -> None:
        self._real_group(at, 1)
        value = at.top(1)
        if type(value) is deque and at.step.name == "maxlen":  # which nothing changes
            self._record.pin(value)
            return
        if at.step.name == "__class__" and (_compat.is_fake(value) or is_of_trace(value)):
            at.put(1, ClassProxy(class_in_trace(value, self._record.stands_for)))
            return
        marked = self._record.marked(value, at.step.name)
        if marked is not value:
            at.put(1, marked)
            return
        path = f"{self._path(at.frame, value)}.{at.step.name}"
        read_attribute(self._record, value, at.step.name, path, at.line)

    def _super(self, at: Instruction) -> None:
        value = super(at.top(2), at.top(1))
        read_attribute(self._record, value, at.step.name, f"super().{at.step.name}", at.line)

    def _set_attribute(self, at: Instruction) -> None:
        owner = self._record.marking(at.top(1), at.step.name)
        if owner is not at.top(1):
            at.put(1, owner)
        read_setting(self._record, owner, at.step.name, at.line)
        self._calls.store(attribute_place(owner, at.step.name), owner, at.line)

    def _import(self, at: Instruction) -> None:
        self._record.read(OutsidePlace("item", sys.modules, at.step.name), at.step.name, at.line)

    # ------------------------------------------------------------------ containers

    def _item(self, at: Instruction) -> None:
        record, key = self._record, at.top(1)
        self._real_group(at, 2)
        container = record.viewed(at.top(2))
        key = plain(key)
        if not record.is_outside(container):
            return
        path = self._path(at.frame, container)
        if isinstance(container, dict) or (
            isinstance(container, (list, tuple)) and isinstance(key, int)
        ):
            self._existing_item(container, key, path, at.line)
        elif is_read(container):
            self._read_contents(at.frame, container, at.line)
        else:
            read_method(record, type(container), "__getitem__", at.line)

    def _existing_item(self, container: Any, key: Any, path: str, line: SourceLine) -> None:
        try:
            container[key] if not isinstance(container, dict) else hash(key)
        except (IndexError, TypeError):
            return  # the instruction raises as well
        self._record.item(container, key, path, line)
        makes = isinstance(container, defaultdict) and container.default_factory is not None
        if makes and key not in container:  # it is there afterwards
            self._substitute.of_given(container.default_factory)
            self._record.mutated(container, line)

    def _set_item(self, at: Instruction) -> None:
        self._real_group(at, 2)
        container = at.top(2)
        key = plain(at.top(1))
        if type(container).__module__ == "numpy" and holds_traced((at.top(1), at.top(3))):
            raise HostWork.ARRAY.refused("an item that it sets", at.line)
        self._record.changes_given(container, at.line)
        if not self._record.is_outside(container):
            return
        if not is_container(container):
            if set_by_c(container):
                self._record.unrepeated.add(self._path(at.frame, container), at.line)
            return
        self._calls.store_item(container, key, at.line)

    def _delete_item(self, at: Instruction) -> None:
        self._real_group(at, 2)
        container, key = at.top(2), plain(at.top(1))
        if is_container(container):
            self._record.changes_given(container, at.line)
            self._record.pin(key)
            self._record.mutated(container, at.line)

    def _goes_over(self, at: Instruction) -> None:
        """Records the start of a loop over an object's items."""
        self._real_group(at, 1)
        self._items(at)

    def _items(self, at: Instruction) -> None:
        """Records a read of an object's items, not of objects in them."""
        self._read_contents(at.frame, at.top(1), at.line, nested=False)

    def _formatted(self, at: Instruction) -> None:
        """Records that a value becomes part of a formatted string."""
        both = at.step.instruction == "FORMAT_VALUE" and at.step.argument & 4
        place = 2 if both or at.step.instruction == "FORMAT_WITH_SPEC" else 1
        self._read_contents(at.frame, at.top(place), at.line)

    def _yielded(self, at: Instruction) -> None:
        """Records a value that a generator expression yields to a function such as `max`."""
        if at.frame.f_code.co_name != "<genexpr>":
            return
        value = at.top(1)
        for each in (value, *value) if type(value) is tuple else (value,):
            self._read_contents(at.frame, each, at.line)

    def _two(self, at: Instruction) -> None:
        is_percent = at.step.name == "%" or at.step.instruction == "BINARY_MODULO"
        if is_percent and isinstance(at.top(2), str) and holds_traced(at.top(1)):
            raise HostWork.TEXT.refused("a value of the graph", at.line)
        for place in (1, 2):
            self._read_contents(at.frame, at.top(place), at.line)

    def _in_place(self, at: Instruction) -> None:
        changed, value = at.top(2), at.top(1)
        self._read_contents(at.frame, value, at.line)
        if isinstance(changed, (list, dict, set, deque)):
            self._record.changes_given(changed, at.line)
            self._record.mutated(changed, at.line)
        else:
            self._read_contents(at.frame, changed, at.line)

    def _same_object(self, at: Instruction) -> None:
        self._real_group(at, 1)
        self._real_group(at, 2)
        self._pin_both(at)
        if at.top(1) is not at.top(2):
            self._record.compares(at.top(1), at.top(2), at.line)

    def _pin_both(self, at: Instruction) -> None:
        if at.top(1) is not None and at.top(2) is not None:
            self._record.pin(at.top(1))
            self._record.pin(at.top(2))

    def _compared(self, at: Instruction) -> None:
        if {type(at.top(1)), type(at.top(2))} - _UNLIKE_NONE == {type(None)}:
            return
        self._two(at)
        if not (is_container(at.top(1)) or is_container(at.top(2))):
            self._pin_both(at)

    def _contains(self, at: Instruction) -> None:
        self._real_group(at, 1)
        key = plain(at.top(2))
        self._record.pin(at.top(2))
        self._calls.contains(at.top(1), key, at.line)

    def _truth(self, at: Instruction) -> None:
        value = at.top(1)
        if is_container(value) and self._record.is_outside(value):
            self._record.size(value, self._path(at.frame, value), at.line)

    def _next(self, at: Instruction) -> None:
        value = at.top(1)
        self._record.iterator(value, self._path(at.frame, value), at.line)

    def _class_pattern(self, at: Instruction) -> None:
        names, kind, value = at.top(1), at.top(2), at.top(3)
        positional = getattr(kind, "__match_args__", ())[: at.step.argument]
        for name in (*positional, *names):
            path = f"{self._path(at.frame, value)}.{name}"
            read_attribute(self._record, value, name, path, at.line)

    def _real_group(self, at: Instruction, place: int) -> None:
        """Replaces a parameter group that the program holds by its stand-in."""
        if self._record.groups:
            at.takes(place, self._record.groups.get(id(at.top(place))))

    def _path(self, frame: FrameType, value: Any) -> str:
        """The name of an object in messages: its known path, or a local variable."""
        names = (name for name, local in frame.f_locals.items() if local is value)
        return self._record.path(value, next(names, type(value).__name__))

    def _read_contents(
        self, frame: FrameType, value: Any, line: SourceLine, nested: bool = True
    ) -> None:
        record = self._record
        value = record.viewed(value)
        if is_read(value) and record.is_outside(value):
            record.contents(value, self._path(frame, value), line, nested)

    # ------------------------------------------------------------------ calls

    def _call(self, at: Instruction) -> None:
        callee, args = at.called_with()
        top = int(at.step.instruction in NAMED_CALLS)
        for place in range(top + 1, top + 1 + at.step.argument):
            self._real_group(at, place)
        self._gives_function(callee, args, at)
        args = self._with_marked(callee, args, at)
        self._calls.call(callee, args, at.line, at.step.discarded, at.step.looped)
        at.takes(at.place_of_callee(), self._substitute(callee, args))

    def _with_marked(self, callee: Any, args: list[Any], at: Instruction) -> list[Any]:
        """Replaces a tensor by its stand-in for `getattr` and the like, if the step has set the
        attribute there."""
        if not (args and isinstance(callee, BuiltinFunctionType) and callee in _BY_NAME):
            return args
        name = "__dict__" if callee is vars else args[1] if len(args) > 1 else None
        of = self._record.marking if callee is setattr else self._record.marked
        args = [of(args[0], name), *args[1:]]
        at.put(int(at.step.instruction in NAMED_CALLS) + len(args), args[0])
        return args

    def _gives_function(self, callee: Any, args: list[Any], at: Instruction) -> None:
        """Wraps functions that a native callee calls, so that their accesses are recorded."""
        top = int(at.step.instruction in NAMED_CALLS) + len(args)
        for number, other in self._functions_given(callee, args, at.line):
            at.put(top - number, other)

    def _giving_functions(self, callee: Any, args: tuple[Any, ...], at: Instruction) -> Any:
        """Wraps them among expanded arguments, which the instruction finds then."""
        others = dict(self._functions_given(callee, args, at.line))
        if others:
            args = tuple(others.get(number, value) for number, value in enumerate(args))
            at.put(1 + (at.step.argument & 1), args)
        return args

    def _functions_given(
        self, callee: Any, args: Sequence[Any], line: SourceLine
    ) -> Iterator[tuple[int, Any]]:
        """Yields the replacements of functions that a callee is given and calls, by position."""
        if is_called_by(callee, args):
            yield 0, followed(args[0], line, self._calls, self._substitute)
        for number in called_within(callee, args):
            other = self._substitute.of_given(args[number])
            if other is not None:
                yield number, other

    def _prepare_call(self, at: Instruction) -> None:
        """Handles `PRECALL` of Python 3.11, which unpacks bound methods."""
        if at.top(at.step.argument + 2) is NULL:
            self._calls.method(at.top(at.step.argument + 1), at.line)

    def _call_expanded(self, at: Instruction) -> None:
        place, args, given = at.expanded_call()
        callee = at.top(place)
        self._read_contents(at.frame, args, at.line)
        if isinstance(args, tuple):
            args = self._giving_functions(callee, args, at)
        given = [*(args if isinstance(args, (tuple, list)) else ()), *given]
        self._calls.call(callee, given, at.line)
        at.takes(place, self._substitute(callee, given))


def holds_traced(value: Any) -> bool:
    """True if a value, or one nested in it, is a tensor or number of the trace that is unknown
    before the call."""
    return any(
        _compat.is_fake(each) or (isinstance(each, SYMBOLIC) and not is_host_number(each))
        for each in leaves_in(value)
    )
