"""What a traced step computes in Python of what only the graph knows, and of lists that it changes:
found at the instructions and calls of the step, and made values of `later`.

A text is put together by Python's own code, of pieces that stand for values. A piece holds lone
surrogates, which no file takes: one that gets anywhere unseen is an error there.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import statistics
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pack_padded_sequence

from graphopt import _compat
from graphopt.ir.source import SourceLine
from graphopt.tracing.array_tensors import made_of_array
from graphopt.tracing.arrays import METHODS, LiveItems, Method
from graphopt.tracing.arrays import is_array as is_array_of_numpy
from graphopt.tracing.classes_asked import class_of_number, has_attribute
from graphopt.tracing.computations import evaluated, functions_in, numbers_in
from graphopt.tracing.in_graph import GraphValues, ItemsOfTensor
from graphopt.tracing.kept_items import KeptItems, PieceOfText
from graphopt.tracing.known_functions import (
    FUNCTIONS,
    GOING_THROUGH,
    MODULES,
    NUMBERS,
    OF_LISTS,
    gives_text,
    is_in,
    is_of,
    is_of_library,
    is_of_numpy,
    is_of_torch,
    is_total,
    makes_tensor,
    of_floats,
)
from graphopt.tracing.known_texts import KnownTexts, hands_on
from graphopt.tracing.later import ESCAPED, Later, applied, are_numbers, argument, as_later
from graphopt.tracing.later_values import (
    holds_later,
    holds_unknown,
    is_later,
    is_later_text,
    letters,
)
from graphopt.tracing.live_arrays import FedItems, LiveArrays
from graphopt.tracing.nests import containers_within, leaves_in
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.numpy_lists import of_list
from graphopt.tracing.outside import kept_lists
from graphopt.tracing.outside.changing_texts import TextOutside
from graphopt.tracing.outside.formats import (
    FieldsOfObject,
    Percent,
    RepeatedText,
    gives_objects_a_width,
    keys_of_object,
)
from graphopt.tracing.outside.held import is_plain_class
from graphopt.tracing.outside.places import FollowedPlace, is_value
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.running_trace import BEGIN, PIECE
from graphopt.tracing.said import saying
from graphopt.tracing.shared_memory import SharedMemory

Replaced = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Says what is called in place of a function to know a value; see `computations.evaluated`."""


class Evaluating(Protocol):
    """Knows values of the graph in this call, and what Python computes of them."""

    def decide_computed(self, value: Later, kind: type, replaced: Replaced) -> Any:
        """What a value is in this call, for which the graph holds; `kind`: of the answer."""

    def in_graph(self, value: Later, replaced: Replaced) -> Any:
        """A tensor of the graph that a value makes; see `GraphValues`."""


class Laters(KnownTexts):
    """Such values of one trace.

    Args:
        record: of what the step does outside its arguments.
        made: knows values of the graph.
        alone: no other rank runs the same step.
        carry: see `LiveArrays`.
    """

    def __init__(
        self, record: Record, made: Evaluating, alone: bool, carry: Callable[[str, Any], bool]
    ) -> None:
        self._record, self._made = record, made
        self._values = GraphValues(
            lambda value: made.in_graph(value, self._at_trace), self.memory_of, alone
        )
        self.of_graph, self.takes = self._values.of, self._values.takes
        self.beside = self._values.beside
        self._texts: list[Later] = []
        self.arrays = LiveArrays(record, carry)
        self.memories: list[SharedMemory] = []
        self.lists: dict[int, Any] = {}
        self._kept: dict[int, list[KeptItems]] = {}

    # ------------------------------------------------------------------ for values

    def text(self, value: Later) -> str:
        """What stands for a value that is a text."""
        return PieceOfText(self._noted(value))

    def text_of(self, function: Callable[..., str], args: Sequence[Any]) -> str:
        """What stands for the text that a function gives."""
        return self.text(Later(function, args))

    def memory_of(self, tensor: torch.Tensor) -> SharedMemory:
        """The memory of a tensor, in which an array lies from here on."""
        self.memories.append(SharedMemory(tensor, _compat.current_tracer().graph))
        return self.memories[-1]

    def number_of(self, function: Callable[..., Any], args: Sequence[Any]) -> Later | None:
        """What stands for the number that a function gives of numbers; None if one is none."""
        return Later(function, args, is_number=True) if are_numbers(args) else None

    def finish(self) -> None:
        """The step is over; see `GraphValues`."""
        self._values.finish()

    def parts(self, text: str) -> Sequence[Any]:
        """Texts and values that a text is put together of."""
        if ESCAPED in text:
            raise refusal(
                "it escapes a text in which there is a number that the graph gives",
                "make the text in graphopt.callback(function, number)",
            )
        pieces = PIECE.split(text)
        found = [
            self._texts[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)
        ]
        if any(BEGIN in each for each in pieces[::2]):
            self._record.texts.note_taken_apart()
        return [piece for piece in found if not isinstance(piece, str) or piece] or [""]

    def decide(self, value: Later, kind: type) -> Any:
        """What a value is in this call."""
        numbers = numbers_in(value)
        texts = [each for each in functions_in(value) if isinstance(each, TextOutside)]
        for text in texts:
            self._record.texts.holds_for(text)
        if texts and not numbers and self._is_exact(value):
            return kind(self.exact(value))
        return self._made.decide_computed(value, kind, self._at_trace)

    def _at_trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, TextOutside):
            return lambda: self._record.texts.holds_for(function)
        if isinstance(function, LiveItems):
            self.arrays.refuse_written(function.container)
        if not isinstance(function, KeptItems):
            return function
        before, _ = self._record.kept(function.container) or (function.container, [])
        return lambda *values: function.of(before, values)

    # ------------------------------------------------------------------ for instructions

    def called(
        self, callee: Any, args: Sequence[Any], line: SourceLine, discarded: bool = False
    ) -> Callable[..., Any] | None:
        """What is called in place of a function; None where it is called itself."""
        callee = original(callee)
        made = made_of_array(callee, args)
        if made is not None:
            return made
        said = saying(self._record, callee, args, line, discarded)
        if said is not None:
            return said
        bound = getattr(callee, "__self__", None)
        of_known = isinstance(bound, (str, list, deque)) or self.arrays.is_written(bound)
        if isinstance(callee, types.BuiltinMethodType) and of_known:
            callee, args = getattr(type(bound), callee.__name__), [bound, *args]
            other = self.called(callee, args, line)
            return None if other is None else functools.partial(other, bound)
        written = self.arrays.called(callee, args, line)
        if written is not None:
            return written
        if of_list(callee, args) is not None and not self.is_kept(args[0]):
            return None  # a number of the graph
        if callee is type and len(args) == 1 and is_later(args[0]):
            return class_of_number
        if callee is hasattr and len(args) == 2 and is_later(args[0]):
            return has_attribute
        if callee is callable and len(args) == 1 and is_later(args[0]):
            return lambda value: False
        function = self._function(callee, args)
        if function is not None and not is_total(callee, args) and self._is_known(list(args)):
            return functools.partial(self._called_now, callee)
        if function is not None:
            kept = [each for each in args if self.is_kept(each, rows=is_of_numpy(callee))]
            lists = bool(kept) and not any(map(self.arrays.is_written, kept))
            lists = lists and bool(kept_lists.folded(self._record, callee, args))
            if not lists and (kept or self._needs(callee, args)):
                return self._applying(function, callee, args, line)
        if is_in(callee, GOING_THROUGH) and any(map(self.is_kept, args)):
            return lambda *given: callee(*(self._gone_through(e, line) for e in given))
        if is_of_torch(callee) and any(self._is_value(each) for each in args):
            arrays = callee is pack_padded_sequence  # which makes tensors of its lengths
            return lambda *given, **named: callee(
                *self.of_graph(given, arrays), **self.of_graph(named, arrays)
            )
        return None

    def _applying(
        self, function: Callable[..., Any], callee: Any, args: Sequence[Any], line: SourceLine
    ) -> Callable[..., Any]:
        is_number = is_in(callee, NUMBERS) or (of_floats(callee) and len(args) == 1)
        rows = is_of_numpy(callee)
        self._reads([each for each in args if not self.is_kept(each, rows)], line)
        of_numbers = is_of(callee, math) or (hasattr(callee, "nin") and is_of_numpy(callee))
        is_number |= of_numbers and are_numbers(args)

        def apply(*args: Any, **options: Any) -> Any:
            args = tuple(self.items(arg, line) if self.is_kept(arg, rows) else arg for arg in args)
            value = applied(function, args, options, is_number and not options)
            if self._is_known(value) and not numbers_in(value):
                evaluated(value, lambda number: number, lambda each: each)  # it may raise
            if callee is isinstance:
                return bool(value)
            return self.text(value) if gives_text(callee) else value

        return apply

    def _reads(self, values: Any, line: SourceLine) -> None:
        """The step computes of what is in these values."""
        for value in containers_within(values):
            if self._record.is_outside(value) and not self.is_kept(value):
                path = self._record.path(value, type(value).__name__)
                self._record.contents(value, path, line)

    def _function(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """A function as one that is called in each call; None where that may not be."""
        if callee is isinstance and args and is_later_text(args[0]):
            return None  # it is a text
        kind = getattr(callee, "__objclass__", None)
        written = args and self.arrays.is_array(args[0]) and self.arrays.is_written(args[0])
        if written and callee.__name__ in METHODS:
            return Method(callee.__name__)
        if callee in (len, bool) and args and self.is_kept(args[0]):
            return None  # an input of the graph
        if kind is str and callee.__name__ == "join":
            kept = self.is_kept(args[-1]) or type(args[-1]) is Later
            return Method("join") if kept or type(args[0]) is Later else None
        if kind is str or (kind in (list, deque) and callee.__name__ in OF_LISTS):
            return Method(callee.__name__)
        if is_in(callee, FUNCTIONS) or makes_tensor(callee):
            return callee  # type: ignore[no-any-return]
        if any(is_of(callee, module) for module in MODULES):
            return callee  # type: ignore[no-any-return]
        return callee if is_of_numpy(callee) else None

    def _needs(self, callee: Any, args: Sequence[Any]) -> bool:
        """Whether what a function is given is not known before the graph has run."""
        if any(map(holds_later, args)):
            return True
        if callee is json.dumps or is_of(callee, statistics) or is_of_numpy(callee):
            return any(map(holds_unknown, args))
        return False

    def taken(self, callee: Any, args: Sequence[Any]) -> Sequence[Any]:
        """What a function is given in place of such values: a list takes them one by one; one that
        is not followed gets texts as they are in this call, and no other values."""
        callee = original(callee)
        name = getattr(callee, "__name__", "")
        if callee is isinstance and args and is_later_text(args[0]):
            return args
        if callee in (len, bool) and args and self.is_kept(args[0]):
            return args  # an input of the graph
        self._note_taken_apart(callee, args)
        if callee in (getattr, hasattr, setattr) and len(args) > 1:
            of = self._record.marking if callee is setattr else self._record.marked
            args = [of(*args[:2]), *args[1:]]
        elif callee is vars and args:
            self._record.marked(args[0], "__dict__")
        if callee is id or is_of_library(callee):
            args = [self.known(each) for each in args]
        if name == "join" and args and is_later_text(args[-1]):
            args = [*args[:-1], letters(args[-1])]
        if name == "join" and args and self._has_pieces(args[-1]):
            args = [*args[:-1], [self._joinable(each) for each in args[-1]]]
        if name in ("extend", "extendleft") and is_later(args[-1]):
            return [*args[:-1], list(as_later(args[-1]))]
        if callee is range:
            return [operator.index(each) if is_later(each) else each for each in args]
        if is_in(callee, GOING_THROUGH):
            args = [letters(each) if is_later_text(each) else each for each in args]
        if not any(map(holds_later, args)):
            return args
        if callee is setattr and not is_plain_class(type(args[0])):
            args = [*args[:-1], self.known(args[-1])]
        if is_in(callee, _BY_KEY) or name == "setdefault":
            return [args[0], self.key(args[1]), *args[2:]]
        if hands_on(callee):
            return args
        return [self.exact(each) for each in args]

    def _has_pieces(self, value: Any) -> bool:
        """Whether the step has made a list or tuple of texts that only Python computes."""
        if type(value) not in (list, tuple) or self._record.is_outside(value):
            return False
        return any(type(each) is Later for each in value)

    def _joinable(self, piece: Any) -> Any:
        """A piece of a text that only Python computes, as a text; another one itself."""
        return self.text(Later("".join, ([piece],))) if type(piece) is Later else piece

    def is_kept(self, value: Any, rows: bool = False) -> bool:
        """Whether a value is a list or a queue of numbers and texts outside, to which the step has
        added, or an array to which each call writes.

        Args:
            rows: so is one of lists and tuples of these, which the step does not change.
        """
        if self.arrays.is_written(value):
            return True
        if type(value) not in (list, deque) or not self._record.is_outside(value):
            return False
        found = self._record.kept(value)
        if found is None or not found[1]:
            return False
        is_row = self._is_row if rows else _is_plain
        return all(map(is_row, value))

    def _is_row(self, value: Any) -> bool:
        if type(value) is dict:
            return not self._record.is_changed(value) and all(map(_is_plain, value.values()))
        if type(value) not in (list, tuple):
            return _is_plain(value)
        return not self._record.is_changed(value) and all(map(self._is_row, value))

    def items(self, container: Any, line: SourceLine, key: Any = None) -> Later:
        """The items of such a list; those that a slice selects."""
        record = self._record
        if self.arrays.is_written(container):
            items = self.arrays.read(container)
            return items if key is None else items[key]
        _, changes = record.kept(container) or (None, [])
        path = record.path(container, type(container).__name__)
        record.reads_behind(container, path, line)
        record.gone_into.add(id(container))
        self.lists[id(container)] = container
        hows, values = [how for how, _ in changes], [v for how, v in changes if how.takes]
        last = None
        if type(key) is slice and type(container) is list and (key.stop, key.step) == (None, None):
            appends = all(how.method == "append" for how in hows)
            last = -key.start if appends and type(key.start) is int and key.start < 0 else None
        numbers = all(type(v) in (int, float) or _is_unknown_number(v) for v in container)
        kept = KeptItems(container, hows, last)
        self._kept.setdefault(id(container), []).append(kept)
        items = Later(kept, values, numbers)
        return items if key is None or last is not None else items[key]

    def settle(self, found: Mapping[int, FollowedPlace]) -> None:
        """The step is over: each call finds these containers, by id, where they are then, and the
        others are the same in each call."""
        for identity, items in self._kept.items():
            if identity not in found:
                self._record.pin(self.lists[identity])
            for each in items:
                each.within = found.get(identity)
            self._record.kept_items += items

    def item(self, container: Any, key: Any, line: SourceLine, fed: bool = False) -> Any:
        """What stands for `container[key]`; None where that is the item itself.

        Args:
            fed: an operator changes it in place, and it goes back.
        """
        if isinstance(container, str):
            return self.text(as_later(container)[key]) if is_later(container) else None
        is_array = self.arrays.is_array(container)
        if is_array and fed:
            return self.arrays.item(container, key)
        if not self.is_kept(container, rows=type(key) is slice and _is_without_tables(container)):
            taken = is_array_of_numpy(container) and not fed and self._is_value(key)
            return argument(container)[key] if taken else None
        return self.items(container, line, key)

    def all_items(self, value: Any, line: SourceLine) -> Later | None:
        """What stands for all items of what a comprehension goes over; None where it goes over
        them one by one."""
        if self.is_kept(value, rows=True):
            return self.items(value, line)
        return value if type(value) is Later else None

    def operand(self, value: Any, line: SourceLine, texts: bool = False) -> Any:
        """What stands for a list that an instruction goes through, or for what it compares, if that
        is a text or holds one; None: itself."""
        if self.is_kept(value):
            return self.items(value, line)
        if not texts or not holds_later(value):
            return None
        kind = type(value)
        if kind in (list, tuple, dict):
            return Later(kind, (value,))
        return as_later(value) if is_later_text(value) else None

    def _is_value(self, value: Any) -> bool:
        """Whether a value is, or holds, something else than texts that only Python computes."""
        return any(type(each) is Later for each in leaves_in(value))

    def taking_items(self, container: Any, key: Any, fed: bool) -> Any:
        """What stands for a tensor of which items are taken that only Python knows, or for an array
        of which it takes one that goes back there, changed; None: itself."""
        is_array = type(container) is Later and container.dimensions is not None
        if fed and (is_array):
            return FedItems(container)
        return self.setting_items(container, key, None)

    def setting_items(self, container: Any, key: Any, value: Any) -> Any:
        """What stands for a tensor whose items are set to, or by, what only Python computes; None:
        itself."""
        if isinstance(container, torch.Tensor) and self._is_value((key, value)):
            return ItemsOfTensor(container, self.of_graph)
        return None

    def _gone_through(self, value: Any, line: SourceLine) -> Any:
        return self.items(value, line) if self.is_kept(value) else value

    def percent(self, text: Any, values: Any, line: SourceLine) -> Any:
        """What stands for the left side of `text % values`."""
        known = self.known(text)
        if not isinstance(known, str):
            return None
        keys = keys_of_object(known, values)
        if keys is not None:
            return FieldsOfObject(known, keys, line)
        unknown = is_later(known) or holds_unknown(values, of_host=True)
        if not unknown and not gives_objects_a_width(known, values):
            return None if known is text else known
        self._reads(values, line)
        return Percent(known)

    def repeated(self, value: Any, times: Any) -> Any:
        """What stands for a text in `text * times`; None: itself."""
        known = type(times) in (int, bool) or not isinstance(times, (int, torch.SymInt))
        return RepeatedText(value) if isinstance(value, str) and not known else None


_BY_KEY = frozenset({setattr, operator.getitem, dict.get, dict.pop, dict.__getitem__})
"""Functions that are given an object and a name or a key, and hand on what is, or comes, there."""


def _is_without_tables(value: Any) -> bool:
    return type(value) in (list, deque) and not any(type(row) in (list, dict) for row in value)


def _is_plain(value: Any) -> bool:
    return _is_unknown_number(value) or is_later(value) or is_value(value)


def _is_unknown_number(value: Any) -> bool:
    return isinstance(value, SYMBOLIC)
