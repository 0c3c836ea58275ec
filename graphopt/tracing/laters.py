"""What a traced step computes in Python of what only the graph knows, and of lists that it changes:
found at the instructions and calls of the step, and made values of `later`.

A text is put together by Python's own code, of pieces that stand for values. A piece holds lone
surrogates, which no file takes: one that gets anywhere unseen is an error there.
"""

from __future__ import annotations

import builtins
import copy
import functools
import json
import math
import operator
import re
import statistics
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt.host.changes import Change
from graphopt.ir.source import SourceLine
from graphopt.tracing.draws.arguments import Method
from graphopt.tracing.draws.arrays import CHANGING, METHODS
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.later import (
    Later,
    applied,
    as_later,
    current_trace,
    evaluated,
    holds_later,
    holds_unknown,
    is_later,
    numbers_in,
)
from graphopt.tracing.live_arrays import LiveArray, LiveArrays
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.numpy_lists import of_list
from graphopt.tracing.outside import kept_lists
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.said import saying

_PIECE = re.compile("\udc81(\\d+)\udc82")
_ESCAPED = "\\udc81"
_FUNCTIONS = frozenset(
    {builtins.sum, builtins.min, builtins.max, builtins.len, builtins.sorted, builtins.abs, round,
     builtins.float, builtins.int, builtins.bool, list, tuple, any, all, divmod, pow, json.dumps,
     isinstance, repr, str, format, torch.tensor, torch.as_tensor, torch.FloatTensor,
     torch.LongTensor, torch.stack, torch.mean, torch.median}
)  # fmt: skip
"""Functions that change nothing, and whose result nothing else has."""
_NUMBERS = frozenset({sum, min, max, len, float, int})
"""What gives a number."""
_MODULES = (math, statistics)
_OF_LISTS = frozenset({"copy", "index", "count"})
_TAKING = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "update", "setdefault"}
)
_GOING_THROUGH = frozenset({reversed, enumerate, zip, iter, map, filter})
_PASSING = frozenset({setattr, zip, enumerate, iter, reversed, dict, map, filter, next,
                      callable, id, type(None)})  # fmt: skip
"""Functions that do nothing with the values that they hand on, or ask them."""


class PieceOfText(str):
    """A text that stands for a value."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return current_trace().text(Later(format, (self, spec))) if spec else str(self)

    def __repr__(self) -> str:
        return current_trace().text(Later(repr, (self,)))

    def __str__(self) -> str:
        return self


class KeptItems:
    """Gives the items of a list or a queue, as a step finds it in a call and has changed it so far.

    Args:
        changes: made so far, in order.
        last: how many of the last items are wanted; None: all.
    """

    def __init__(self, container: Any, changes: Sequence[Change], last: int | None = None) -> None:
        self.container, self.changes, self.last = container, tuple(changes), last
        self.__name__ = "items"

    def __call__(self, *values: Any) -> Any:
        return self.of(self.container, values)

    def of(self, container: Any, values: Sequence[Any]) -> Any:
        """The items, given what was there before the step."""
        items = copy.copy(container) if self.last is None else container[-self.last :]
        given = iter(values)
        for change in self.changes:
            change.make(items, next(given) if change.takes else None)
        return items if self.last is None else items[-self.last :]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptItems) or self.container is not other.container:
            return False
        return (self.changes, self.last) == (other.changes, other.last)

    def __hash__(self) -> int:
        return hash((id(self.container), self.last))


class Laters:
    """Such values of one trace.

    Args:
        record: of what the step does outside its arguments.
        ask: the value of something, by `evaluated`, and the kind of the answer.
    """

    def __init__(
        self, record: Record, ask: Callable[[Later, type, Callable[[Any], Any]], Any]
    ) -> None:
        self._record, self._ask = record, ask
        self._texts: list[Later] = []
        self.arrays = LiveArrays(record)
        self.lists: dict[int, Any] = {}

    # ------------------------------------------------------------------ for values

    def text(self, value: Later) -> str:
        """What stands for a value that is a text."""
        self._texts.append(value)
        return PieceOfText(f"\udc81{len(self._texts) - 1}\udc82")

    def parts(self, text: str) -> Sequence[Any]:
        """Texts and values that a text is put together of."""
        if _ESCAPED in text:
            raise refusal(
                "it escapes a text in which there is a number that the graph gives",
                "make the text in graphopt.callback(function, number)",
            )
        pieces = _PIECE.split(text)
        found = [
            self._texts[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)
        ]
        return [piece for piece in found if not isinstance(piece, str) or piece] or [""]

    def decide(self, value: Later, kind: type) -> Any:
        """What a value is in this call."""
        return self._ask(value, kind, self._at_trace)

    def _at_trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
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
        function = self._function(callee, args)
        if function is not None:
            lists = any(map(self.is_kept, args)) and kept_lists.folded(self._record, callee, args)
            if not lists and (self._needs(callee, args) or any(map(self.is_kept, args))):
                return self._applying(function, callee, args, line)
        if _is_in(callee, _GOING_THROUGH) and any(map(self.is_kept, args)):
            return lambda *given: callee(*(self._gone_through(e, line) for e in given))
        return None

    def _applying(
        self, function: Callable[..., Any], callee: Any, args: Sequence[Any], line: SourceLine
    ) -> Callable[..., Any]:
        is_number = _is_in(callee, _NUMBERS) or (_of_floats(callee) and len(args) == 1)

        def apply(*args: Any, **options: Any) -> Any:
            args = tuple(self.items(arg, line) if self.is_kept(arg) else arg for arg in args)
            value = applied(function, args, options, is_number and not options)
            if callee is isinstance:
                return bool(value)
            return self.text(value) if _gives_text(callee) else value

        return apply

    def _function(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """A function as one that is called in each call; None where that may not be."""
        kind = getattr(callee, "__objclass__", None)
        if args and self.arrays.is_written(args[0]) and callee.__name__ in METHODS:
            return Method(callee.__name__)
        if callee in (len, bool) and args and self.is_kept(args[0]):
            return None  # an input of the graph
        if kind is str or (kind in (list, deque) and callee.__name__ in _OF_LISTS):
            return None if callee.__name__ == "join" else Method(callee.__name__)
        if _is_in(callee, _FUNCTIONS) or any(_is_of(callee, module) for module in _MODULES):
            return callee  # type: ignore[no-any-return]
        return callee if _is_of_numpy(callee) else None

    def _needs(self, callee: Any, args: Sequence[Any]) -> bool:
        """Whether what a function is given is not known before the graph has run."""
        if any(map(holds_later, args)):
            return True
        if callee is json.dumps or _is_of(callee, statistics) or _is_of_numpy(callee):
            return any(map(holds_unknown, args))
        return False

    def taken(self, callee: Any, args: Sequence[Any]) -> Sequence[Any]:
        """What a function is given in place of such values: a list takes them one by one; one that
        is not followed gets texts as they are in this call, and no other values."""
        callee = original(callee)
        name = getattr(callee, "__name__", "")
        if name in ("extend", "extendleft") and type(args[-1]) is Later:
            return [*args[:-1], list(args[-1])]
        if not any(map(holds_later, args)) or _is_followed(callee):
            return args
        return [self.exact(each) for each in args]

    def not_taken(self, callee: Any, args: Sequence[Any]) -> None:
        """Refuse to give such values to a function that is not followed."""
        for each in args:
            if not _is_followed(original(callee)) and self.exact(each) is not each:
                raise refusal(
                    "it gives a text with numbers in it to a function by *args, which is not"
                    " followed",
                    "give the arguments one by one",
                )

    def key(self, text: str) -> str:
        """A key as it is in this call."""
        if not is_later(text) or self._is_exact(as_later(text)):
            return self.exact(text)  # type: ignore[no-any-return]
        raise refusal(
            "a text with a number that the graph gives is a key",
            "let the key be a number that is known before the call, or keep the text as a value",
        )

    def exact(self, value: Any) -> Any:
        """A text as it is in this call, for which the graph holds alone; others themselves."""
        if not is_later(value):
            return value
        value = as_later(value)
        if not self._is_exact(value):
            raise refusal(
                "it gives a value that only Python computes, of what the graph gives or of a list"
                " that it changes, to code that is not followed",
                "let a function do it that is called in every step: graphopt.callback(function,"
                " value)",
            )
        return evaluated(value, lambda number: number.exactly(), self._at_trace)

    def _is_exact(self, value: Later) -> bool:
        """Whether a value is known before each call."""
        lists = any(isinstance(f, (KeptItems, LiveArray)) for f in functions_in(value))
        return not lists and all(map(is_host_number, numbers_in(value)))

    def is_kept(self, value: Any) -> bool:
        """Whether a value is a list or a queue of numbers and texts outside, to which the step has
        added, or an array to which each call writes."""
        if self.arrays.is_written(value):
            return True
        if type(value) not in (list, deque) or not self._record.is_outside(value):
            return False
        found = self._record.kept(value)
        return found is not None and bool(found[1]) and all(map(_is_plain, value))

    def items(self, container: Any, line: SourceLine, key: Any = None) -> Later:
        """The items of such a list; those that a slice selects."""
        record = self._record
        if self.arrays.is_written(container):
            items = self.arrays.read(container)
            return items if key is None else items[key]
        _, changes = record.kept(container) or (None, [])
        path = record.path(container, type(container).__name__)
        record.reads_behind(container, path, line)
        record.pin(container)
        self.lists[id(container)] = container
        hows, values = [how for how, _ in changes], [v for how, v in changes if how.takes]
        last = None
        if type(key) is slice and type(container) is list and (key.stop, key.step) == (None, None):
            appends = all(how.method == "append" for how in hows)
            last = -key.start if appends and type(key.start) is int and key.start < 0 else None
        numbers = all(type(v) in (int, float) or isinstance(v, SYMBOLIC) for v in container)
        items = Later(KeptItems(container, hows, last), values, numbers)
        return items if key is None or last is not None else items[key]

    def item(self, container: Any, key: Any, line: SourceLine, feeding: bool = False) -> Any:
        """What stands for `container[key]`; None where that is the item itself.

        Args:
            feeding: it only goes into a store to where it comes from.
        """
        if isinstance(container, str):
            return as_later(container)[key] if is_later(container) else None
        is_array = self.arrays.is_array(container)
        if is_array and feeding:
            return self.arrays.item(container, key)
        if not self.is_kept(container):
            return None
        return self.items(container, line, key)

    def piece(self, text: str) -> str | None:
        """A text that stands for a value as one that knows that; None: no such text."""
        return PieceOfText(text) if is_later(text) else None

    def operand(self, value: Any, line: SourceLine, texts: bool = False) -> Any:
        """What stands for a list that an instruction goes through, or for a text that it compares;
        None: itself."""
        if self.is_kept(value):
            return self.items(value, line)
        return as_later(value) if texts and isinstance(value, str) and is_later(value) else None

    def _gone_through(self, value: Any, line: SourceLine) -> Any:
        return self.items(value, line) if self.is_kept(value) else value

    def percent(self, text: Any, values: Any) -> Any:
        """What stands for the left side of `text % values`."""
        if isinstance(text, str) and (is_later(text) or holds_unknown(values, of_host=True)):
            return _Percent(text)
        return None


class _Percent:
    """The left side of `text % values`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __mod__(self, values: Any) -> str:
        return current_trace().text(Later(operator.mod, (self._text, values)))


def functions_in(value: Any) -> list[Callable[..., Any]]:
    """The functions that a value is made by."""
    found: list[Callable[..., Any]] = []
    evaluated(value, lambda number: number, lambda f: lambda *args: found.append(f))
    return found


def _is_followed(callee: Any) -> bool:
    """Whether such values may be given to a callee: one that is observed, or hands them on."""
    from graphopt.tracing.outside.files import is_observed

    callee = getattr(callee, "__func__", callee)
    if isinstance(callee, types.FunctionType):
        return is_observed(callee.__code__.co_filename)
    name = getattr(callee, "__name__", "")
    if name in _TAKING or name == "join" or _is_in(callee, _PASSING):
        return True
    code = callee.__init__ if isinstance(callee, type) else type(callee).__call__
    return isinstance(callee, functools.partial) or hasattr(code, "__code__")


def _is_plain(value: Any) -> bool:
    return isinstance(value, SYMBOLIC) or is_later(value) or is_value(value)


def _is_in(callee: Any, functions: frozenset[Any]) -> bool:
    try:
        return callee in functions
    except TypeError:  # it has no hash
        return False


def _is_of(callee: Any, module: Any) -> bool:
    name = getattr(callee, "__name__", None)
    return isinstance(name, str) and getattr(module, name, None) is callee and callable(callee)


def _is_of_numpy(callee: Any) -> bool:
    """Whether a callee is a function of numpy's that changes nothing."""
    module = str(getattr(callee, "__module__", None) or type(callee).__module__)
    if module.partition(".")[0] != "numpy" or "random" in module:
        return False
    of = getattr(callee, "__self__", None)
    free = of is None or isinstance(of, types.ModuleType)
    return free and getattr(callee, "__name__", "") not in CHANGING


def _of_floats(callee: Any) -> bool:
    name = getattr(callee, "__name__", "")
    return _is_of(callee, statistics) or (
        _is_of_numpy(callee) and name in ("mean", "std", "var", "median", "average", "percentile")
    )


def _gives_text(callee: Any) -> bool:
    if callee in (json.dumps, repr, str, format):
        return True
    name = getattr(callee, "__name__", "")
    return getattr(callee, "__objclass__", None) is str and name in _TEXTS


_TEXTS = frozenset(
    {"format", "ljust", "rjust", "center", "strip", "lstrip", "rstrip", "upper", "lower", "title",
     "replace", "zfill", "removeprefix", "removesuffix", "capitalize", "expandtabs"}
)  # fmt: skip
"""Methods of texts that give a text."""
