"""What an instruction of a Python function reads from outside the step, and what it writes.

Asked before the instruction is executed, with its operands (`_compat.frames`). Which method is
asked for which instruction says `accesses`.
"""

from __future__ import annotations

import builtins
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import CellType, FrameType, ModuleType
from typing import Any

from graphopt import _compat
from graphopt._compat.frames import NULL
from graphopt.host.changes import changes_of
from graphopt.ir.source import SourceLine
from graphopt.tracing.arrays import is_array
from graphopt.tracing.arrays_beside import beside
from graphopt.tracing.classes_asked import Classed, class_in_trace, is_of_trace
from graphopt.tracing.host_numbers import plain
from graphopt.tracing.inputs import may_be_input
from graphopt.tracing.later_values import is_later
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside import kept_lists
from graphopt.tracing.outside.accesses import OutsideAccess
from graphopt.tracing.outside.attributes import (
    attribute_place,
    read_attribute,
    read_method,
    read_setting,
)
from graphopt.tracing.outside.callees import NAMED_CALLS, Instruction, Substitute, instruction_of
from graphopt.tracing.outside.calls import NativeCalls
from graphopt.tracing.outside.given_functions import GivenFunction, is_called_by
from graphopt.tracing.outside.held import is_plain_class
from graphopt.tracing.outside.later_operands import Gives, LaterOperands
from graphopt.tracing.outside.native import is_large_array, set_by_c
from graphopt.tracing.outside.one_by_one import OneByOne, adding_one_by_one, is_gone_through
from graphopt.tracing.outside.places import MISSING, OutsidePlace, is_container, is_read
from graphopt.tracing.outside.record import Record

_UNLIKE_NONE = frozenset({list, tuple, dict, set, deque, OrderedDict, defaultdict, Counter})
"""Containers that equal no None, whatever is in them."""
_BEGINNING = frozenset({defaultdict, Counter})
"""Dictionaries in which a step may begin to count."""
_METHODS = {"+=": "__iadd__", "|=": "__ior__", "-=": "difference_update"}
"""What operators do with lists, queues and sets."""


class Instructions(LaterOperands):
    """Follows the instructions of observed functions into a record."""

    def __init__(self, record: Record, substitute: Substitute) -> None:
        self._record = record
        self._substitute = substitute
        self._calls = NativeCalls(record)

    def before(self, frame: FrameType, step: OutsideAccess) -> None:
        """`frame` is about to execute an instruction."""
        handler: Callable[[Instruction], None] = getattr(self, step.handler)
        at = instruction_of(frame, step)
        record = self._record
        if step.feeding is None:
            loaded = record.texts.looked_for(at)
            handler(at)
            if loaded is not None:
                record.texts.show(loaded, frame)
            if step.counting:
                record.read_loaded((id(frame), step.offset))
            return
        record.pending = []
        try:
            handler(at)
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
        self, at: Instruction, place: OutsidePlace | None, owner: Any, path: str | None = None
    ) -> None:
        """A store: of a value made from what was at the same place, or of another."""
        self._calls.store(place, owner, at.line, self._counts_in(at, place), path)

    def _counts_in(self, at: Instruction, place: OutsidePlace | None) -> bool:
        """Whether what is stored in `place` is made of what is there; all else that it is made of
        is read."""
        return self._record.read_loaded((id(at.frame), at.step.offset), place)

    # ------------------------------------------------------------------ names

    def _global(self, at: Instruction) -> None:
        names, known = at.frame.f_globals, vars(builtins)
        if at.step.name in names or at.step.name not in known:
            self._record.read(OutsidePlace("item", names, at.step.name), at.step.name, at.line)
            return
        self._record.read(
            OutsidePlace("has", names, at.step.name), f"{at.step.name} in globals", at.line
        )
        self._record.read(OutsidePlace("item", known, at.step.name), at.step.name, at.line)

    def _name(self, at: Instruction) -> None:
        if at.step.name not in at.frame.f_locals:
            self._global(at)

    def _cell(self, at: Instruction) -> None:
        cell = at.variable(at.step.argument)
        if isinstance(cell, CellType) and self._record.is_outside(cell):
            self._record.read(OutsidePlace("cell", cell), at.step.name, at.line)

    def _set_global(self, at: Instruction) -> None:
        names = at.frame.f_globals
        self._stored(at, OutsidePlace("item", names, at.step.name), names, at.step.name)

    def _set_cell(self, at: Instruction) -> None:
        cell = at.variable(at.step.argument)
        if isinstance(cell, CellType):
            self._stored(at, OutsidePlace("cell", cell), cell, at.step.name)

    # ------------------------------------------------------------------ attributes

    def _attribute(self, at: Instruction) -> None:
        self._real_group(at, 1)
        value = at.top(1)
        if type(value) is deque and at.step.name == "maxlen":  # which nothing changes
            self._record.pin(value)
            return
        if at.step.name == "__class__" and (_compat.is_fake(value) or is_of_trace(value)):
            at.put(1, Classed(class_in_trace(value, self._record.stands_for)))
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
        if not (isinstance(owner, ModuleType) or is_plain_class(type(owner))):
            self._known(at, 2)  # torch's own code may read it
        read_setting(self._record, owner, at.step.name, at.line)
        self._stored(at, attribute_place(owner, at.step.name), owner)

    def _import(self, at: Instruction) -> None:
        self._record.read(OutsidePlace("item", sys.modules, at.step.name), at.step.name, at.line)

    # ------------------------------------------------------------------ containers

    def _item(self, at: Instruction) -> None:
        record, key = self._record, at.top(1)
        self._real_group(at, 2)
        if at.step.fed:
            self._fed(at)
        if at.takes(2, record.laters.taking_items(at.top(2), key, at.step.fed)):
            return
        if type(key) is not slice:
            self._known(at, 2)
        container = record.viewed(at.top(2))
        if record.laters.arrays.is_table(container, key):
            at.put(2, Gives(record.laters.arrays.item_of_table(container, key, at.step.fed)))
            at.put(1, 0)
            return
        changed = record.laters.arrays.row_item(container, key) if at.step.fed else None
        if changed is not None:
            at.put(2, Gives(changed))
            at.put(1, 0)
            return
        laters = record.laters
        key = self._exact(at, 1, plain(key))
        kept = kept_lists.item(record, container, key)
        if kept is not None:
            kept_lists.reads(record, kept, container, f"{{}}[{key}]", at.line)
            return
        if type(key) is slice and self._goes_back(at.frame, container):
            record.read_container(id(at.frame), container)
            item = laters.items(container, at.line, key)
        else:
            item = laters.item(container, at.top(1), at.line, at.step.fed)
        if item is not None:
            if is_array(container) and not (at.step.fed or laters.is_kept(container)):
                self._read_contents(at.frame, container, at.line)
            at.put(2, Gives(item))
            at.put(1, 0)
            return
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

    def _fed(self, at: Instruction) -> None:
        """An item is taken that goes back to where it comes from: the container is there twice."""
        key, container, like = at.top(1), at.top(2), object()
        made = self._record.laters.arrays.made(container, like, (key,), at.frame, stacked=2)
        if at.takes(2, made):
            at.put(4 + int(at.step.instruction == "BINARY_SLICE"), made)

    def _goes_back(self, frame: FrameType, value: Any) -> bool:
        """Whether what is made of a list outside takes its place, and goes nowhere else."""
        if type(value) is not list or not self._record.is_outside(value):
            return False
        if self._record.has_set_item(value):
            return False
        loaded = self._record.loads.places(id(frame))
        taken = (place for place in loaded if not self._record.is_own(place.holder))
        found = any(place.now() is value for place in taken)
        return found and all(map(self._may_be_copied, value))

    def _may_be_copied(self, item: Any) -> bool:
        """Whether an item of the former list may be another one in the new list: no container or
        object that the step has made, and no tensor in the memory of one that it is given."""
        if type(item) is tuple:
            return all(map(self._may_be_copied, item))
        if _compat.is_fake(item):
            return _compat.storage_key(item) not in self._record.storages
        return not self._record.is_made_here(item) or isinstance(item, SYMBOLIC) or is_later(item)

    def _existing_item(self, container: Any, key: Any, path: str, line: SourceLine) -> None:
        try:
            container[key] if not isinstance(container, dict) else hash(key)
        except (IndexError, TypeError):
            return  # the instruction raises as well
        self._record.item(container, key, path, line)
        makes = isinstance(container, defaultdict) and container.default_factory is not None
        if makes and key not in container:  # it is there afterwards
            self._record.mutated(container, line)

    def _set_item(self, at: Instruction) -> None:
        self._real_group(at, 2)
        container, arrays, like = at.top(2), self._record.laters.arrays, object()
        if arrays.is_table(container, at.top(1)):
            at.takes(2, arrays.setter(container, at.top(1), at.top(3), at.line))
            return
        if at.takes(2, arrays.row_setter(container, at.line)):
            return
        key = self._exact(at, 1, plain(at.top(1)))
        if at.takes(2, self._record.laters.setting_items(container, at.top(1), at.top(3))):
            return
        if not isinstance(container, (list, dict)) and not is_plain_class(type(container)):
            self._known(at, 3)
        if at.takes(2, arrays.made(container, like, (at.top(1), at.top(3)), at.frame)):
            return
        if not self._record.is_outside(container):
            return
        if at.takes(2, arrays.setter(container, at.top(1), at.top(3), at.line)):
            return
        if not is_container(container):
            if set_by_c(container):
                self._record.unrepeated.add(self._path(at.frame, container), at.line)
            return
        if self._record.replaces(container, key, at.top(3)):
            return
        self._watch(at, container)
        place = OutsidePlace("item", container, key)
        self._calls.store_item(container, key, at.line, self._counts_in(at, place))

    def _delete_item(self, at: Instruction) -> None:
        self._real_group(at, 2)
        container, key = at.top(2), plain(at.top(1))
        if is_container(container):
            self._record.pin(key)
            self._record.mutated(container, at.line, changes_of("__delitem__", [key]))

    def _contents(self, at: Instruction) -> None:
        self._read_contents(at.frame, at.top(1), at.line)

    def _goes_over(self, at: Instruction) -> None:
        """A loop over the items of an object begins."""
        if self._computes_of_all(at):
            return
        self._real_group(at, 1)
        self._items(at)

    def _items(self, at: Instruction) -> None:
        """The step gets the items, and what it reads in them is seen."""
        texts = isinstance(at.top(1), str)  # of other values it gets each one as it is
        if not self._stands_later(at, 1, texts):
            self._read_contents(at.frame, at.top(1), at.line, nested=False)

    def _yielded(self, at: Instruction) -> None:
        """Functions such as `max` go through a generator expression, and compare what it gives."""
        if at.frame.f_code.co_name != "<genexpr>":
            return
        value = at.top(1)
        for each in (value, *value) if type(value) is tuple else (value,):
            self._read_contents(at.frame, each, at.line)

    def _two(self, at: Instruction) -> None:
        is_percent = at.step.name == "%" or at.step.instruction == "BINARY_MODULO"
        laters = self._record.laters
        if is_percent and at.takes(2, laters.percent(at.top(2), at.top(1), at.line)):
            return
        if at.step.name == "*":
            at.takes(2, laters.repeated(at.top(2), at.top(1)))
            at.takes(1, laters.repeated(at.top(1), at.top(2)))
        self._known_beside(at, 1, 2)
        self._known_beside(at, 2, 1)
        for place in (1, 2):
            if not self._stands_later(at, place, at.step.handler == "_compared"):
                self._read_contents(at.frame, at.top(place), at.line)
        if at.step.handler == "_two":
            at.takes(1, beside(at.top(2), at.top(1)))

    def _in_place(self, at: Instruction) -> None:
        if at.step.name == "*=" and at.takes(2, self._record.laters.repeated(at.top(2), at.top(1))):
            return
        self._known_beside(at, 1, 2)
        self._known_beside(at, 2, 1)
        changed, value = at.top(2), at.top(1)
        arrays, like = self._record.laters.arrays, object()
        if at.takes(2, arrays.made(changed, like, (value,), at.frame)):
            return
        if at.takes(2, arrays.changer(changed, at.step.name, value, at.line)):
            return
        if at.step.name == "+=" and is_gone_through(self._record, changed, "__iadd__", value):
            at.takes(2, OneByOne(changed, partial(self._followed, at.line)))
            return
        self._read_contents(at.frame, value, at.line)
        if isinstance(changed, (list, dict, set, deque)):
            self._record.read_container(id(at.frame), changed)
            self._record.mutated(
                changed, at.line, changes_of(_METHODS.get(at.step.name, ""), [value])
            )
        else:
            self._watch(at, changed)
            self._read_contents(at.frame, changed, at.line)

    def _watch(self, at: Instruction, value: Any) -> None:
        if is_large_array(value) and self._record.is_outside(value):
            self._record.unrepeated.watches(value, self._path(at.frame, value), at.line)

    def _same_object(self, at: Instruction) -> None:
        self._real_group(at, 1)
        self._real_group(at, 2)
        self._known(at, 1)
        self._known(at, 2)
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
        container = at.top(1)
        if isinstance(container, str) and self._stands_later(at, 1, texts=True):
            return
        if self._record.laters.is_kept(container):
            self._stands_later(at, 1)
            return
        if isinstance(container, (list, tuple)) and self._stands_later(at, 2, texts=True):
            return
        key = self._exact(at, 2, plain(at.top(2)))
        self._record.pin(at.top(2))
        self._calls.contains(at.top(1), key, at.line)

    def _truth(self, at: Instruction) -> None:
        self._known(at, 1)
        value = at.top(1)
        if is_container(value) and self._record.is_outside(value):
            path = self._path(at.frame, value)
            bool(self._record.asks_length(value, path, at.line))

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
        """Let an instruction find the stand-in of a parameter group that the program holds."""
        if self._record.groups:
            at.takes(place, self._record.groups.get(id(at.top(place))))

    def _path(self, frame: FrameType, value: Any) -> str:
        """How a message calls an object: as the step has got to it, or the function calls it."""
        names = (name for name, local in frame.f_locals.items() if local is value)
        return self._record.path(value, next(names, type(value).__name__))

    def _read_contents(
        self, frame: FrameType, value: Any, line: SourceLine, nested: bool = True
    ) -> None:
        record = self._record
        value = record.viewed(value)
        if is_read(value) and record.is_outside(value):
            record.read_container(id(frame), value)
            record.contents(value, self._path(frame, value), line, nested)

    # ------------------------------------------------------------------ calls

    def _call(self, at: Instruction) -> None:
        callee, args = at.called_with()
        top = int(at.step.instruction in NAMED_CALLS)
        for place in range(top + 1, top + 1 + at.step.argument):
            self._real_group(at, place)
        self._record.texts.calls(at, callee)
        for each in args:
            if is_container(each):
                self._record.read_container(id(at.frame), each)
        self._gives_function(callee, args, at)
        if at.takes(at.place_of_callee(), self._instead(callee, args, at)):
            return
        follow = partial(self._followed, at.line)
        one_by_one = adding_one_by_one(self._record, callee, args, follow)
        if at.takes(at.place_of_callee(), one_by_one):
            return
        args = self._taken(callee, args, at)
        self._calls.call(callee, args, at.line, at.step.discarded, at.step.looped)
        at.takes(at.place_of_callee(), self._substitute(callee, args))

    def _gives_function(self, callee: Any, args: list[Any], at: Instruction) -> None:
        """Let a function be called by another one as the step's instructions would."""
        if is_called_by(callee, args):
            top = int(at.step.instruction in NAMED_CALLS)
            at.put(top + len(args), self._followed(at.line, args[0]))

    def _followed(self, line: SourceLine, function: Any) -> GivenFunction:
        """A function in whose place it is called as by an instruction of the step."""
        return GivenFunction(function, line, self._record, self._calls, self._substitute)

    def _prepare_call(self, at: Instruction) -> None:
        """Python 3.11 takes bound methods apart before the call."""
        if at.top(at.step.argument + 2) is NULL:
            self._calls.method(at.top(at.step.argument + 1), at.line)

    def _call_expanded(self, at: Instruction) -> None:
        self._spread(at)
        place, args, given = at.expanded_call()
        callee = at.top(place)
        self._record.texts.calls(at, callee)
        self._read_contents(at.frame, args, at.line)
        given = [*(args if isinstance(args, (tuple, list)) else ()), *given]
        if at.takes(place, self._instead(callee, given, at)):
            return
        self._record.laters.not_taken(callee, given)
        self._calls.call(callee, given, at.line)
        at.takes(place, self._substitute(callee, given))


def _may_count(value: Any) -> bool:
    """Whether an input of a graph may be what a place holds in which a step counts; or a list whose
    end takes its place. Others are read: operators take tensors, and a text that grows is another
    one in each call."""
    kinds = (list, deque, *SYMBOLIC)
    return value is MISSING or may_be_input(value) or isinstance(value, kinds)
