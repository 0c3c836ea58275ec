"""Calls of native functions: what they read of their arguments, and change in them."""

from __future__ import annotations

import contextvars
import functools
import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from graphopt.ir.source import SourceLine
from graphopt.tracing.bytecode import native
from graphopt.tracing.bytecode.accesses import is_observed
from graphopt.tracing.bytecode.attributes import (
    attribute_place,
    read_attribute,
    read_class,
    read_function,
    read_method,
    read_setting,
)
from graphopt.tracing.bytecode.native import ContextVariables
from graphopt.tracing.effects.callback import callback
from graphopt.tracing.interception.replaced_functions import original
from graphopt.tracing.outside.places import (
    OutsidePlace,
    attributes_of,
    filled,
    is_container,
    is_read,
    is_value,
    key_text,
)
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.outside.unrepeated import users
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.scalars.host_numbers import plain

_ADDING = frozenset({"append", "extend", "insert", "add", "update", "appendleft", "extendleft"})
_CHANGING = frozenset(
    {"clear", "sort", "reverse", "pop", "popitem", "popleft", "remove", "discard", "setdefault",
     "rotate", "difference_update", "intersection_update", "move_to_end"}
)  # fmt: skip
_GIVING_ITEMS = frozenset({"items", "values", "keys", "copy", "__iter__"})
_FEW = 100
_BY_CONTENTS = frozenset({"sort", "remove", "intersection_update"})
_BY_KEY = frozenset({"get", "__getitem__"})
_ONE_ITEM = frozenset({"pop", "setdefault"})
_IDENTITY = frozenset({id, type, isinstance, issubclass, callable, super, print, hash})
_OF_ONE_OBJECT = frozenset({id, hash})
_TAKING_APART = frozenset(
    {isinstance, issubclass, type, callable, super, getattr, hasattr, setattr, len, next, iter,
     vars, dir, float, int, bool, complex, abs, round, list, tuple, dict, enumerate, zip, map,
     filter, reversed, sum, min, max, sorted, any, all, operator.getitem, operator.contains}
)  # fmt: skip
"""Functions that see of an object only what is observed: its places, and its methods in Python."""
_GIVING_EACH = frozenset({zip, enumerate, reversed})
"""Functions that give items one by one, and look at none."""
_CLASS = frozenset({isinstance, type})
_ASKING = frozenset({len, next, getattr, hasattr, setattr, vars, dir, callable, bool})
"""Functions that take no values from an iterator, or are followed where they do."""
_PICKLING = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})
_READING_OBJECTS = (vars, dir)
_KEYS: type = type({}.keys())


class NativeCalls:
    """Records the outside accesses of calls whose code is not observed."""

    def __init__(self, record: OutsideRecord) -> None:
        self._record = record
        self._variables = ContextVariables(record)

    def call(
        self,
        callee: Any,
        args: Sequence[Any],
        line: SourceLine,
        discarded: bool = False,
        looped: bool = False,
    ) -> None:
        """Records a call of `callee`; `args` are its positional and keyword values.

        Args:
            discarded: nothing uses the result.
            looped: the step goes through the result.
        """
        callee = original(callee)
        if isinstance(callee, types.MethodType):
            self.method(callee, line)
            callee, args = callee.__func__, [callee.__self__, *args]
        if isinstance(callee, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._record.viewed(callee)
            bound = callee.__self__
            if bound is not None and not isinstance(bound, types.ModuleType):
                self._on(callee.__name__, bound, args, line, discarded)
                return
        elif isinstance(callee, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            if args:
                self._on(callee.__name__, args[0], args[1:], line, discarded)
            return
        if isinstance(callee, types.FunctionType):
            read_function(self._record, callee, line)
            if is_untraced(callee):
                self._untraced(callee, args, line)
        elif isinstance(callee, functools.partial):
            self._partial(callee, args, line)
        elif not isinstance(callee, type) and not isinstance(callee, types.BuiltinFunctionType):
            self._object(callee, args, line)
        else:
            self._builtin(callee, args, line, looped)

    def _untraced(
        self, function: types.FunctionType, args: Sequence[Any], line: SourceLine
    ) -> None:
        """Records a call of a Python function whose instructions are not observed."""
        record = self._record
        self._all(args, line)
        if function is callback:  # the host view knows what is done with them
            self._note_given(args, line)
        else:
            self._give(args, line)
        if native.is_changing_call(function, args) and record.is_outside(args[0]):
            record.unrepeated.add(record.path(args[0], type(args[0]).__name__), line)

    def _builtin(
        self, callee: Any, args: Sequence[Any], line: SourceLine, looped: bool = False
    ) -> None:
        record = self._record
        if native.is_of_process(callee):
            record.unrepeated.add(f"the process ({callee.__name__})", line)
        if callee in _CLASS and args:
            read_class(record, args[0], record.path(args[0], type(args[0]).__name__), line)
        if callee in _OF_ONE_OBJECT or not (isinstance(callee, type) or callee in _TAKING_APART):
            self._pin(args)
        if callee in _IDENTITY or not args:
            return
        if callee is not iter and callee not in _ASKING:
            self._note_given(args, line)
        if callee in (getattr, hasattr) and isinstance(args[1], str):
            path = f"{record.path(args[0], type(args[0]).__name__)}.{args[1]}"
            read_attribute(record, args[0], args[1], path, line)
        elif callee is setattr:
            read_setting(record, args[0], args[1], line)
            self.store(attribute_place(args[0], args[1]), args[0], line)
        elif callee is len or (callee is bool and is_container(args[0])):
            if record.is_outside(args[0]):
                record.size(args[0], record.path(args[0], type(args[0]).__name__), line)
        elif callee is next:
            self._advance(args[0], line)
        elif callee in _READING_OBJECTS:
            self._attributes(args[0], line)
        elif callee is operator.getitem:
            self._on("__getitem__", args[0], args[1:], line)
        elif callee is operator.contains:
            self.contains(args[0], args[1], line)
        else:
            self._all(args, line, nested=not (looped and callee in _GIVING_EACH))

    def store(
        self, place: OutsidePlace | None, owner: Any, line: SourceLine, path: str | None = None
    ) -> None:
        """Records a write to a place of `owner`."""
        if place is not None and self._record.is_outside(owner):
            self._record.wrote(place, owner, path, line)

    def _on(
        self, name: str, bound: Any, args: Sequence[Any], line: SourceLine, discarded: bool = False
    ) -> None:
        """Records a method call on a container or another native object."""
        record = self._record
        bound = record.viewed(bound)
        if isinstance(bound, (dict, list)) and name not in _ADDING:
            args = tuple(map(plain, args))  # keys
        self._give(args, line)
        self._all(args if name not in _ADDING else (), line)
        if name in _ADDING or name in _CHANGING:
            record.changes_given(bound, line)
        if not record.is_outside(bound):
            return
        path = record.path(bound, type(bound).__name__)
        if isinstance(bound, contextvars.ContextVar):
            self._variables.method(name, bound, args, path, line)
        elif name == "__next__":
            self._advance(bound, line)
        elif name in _PICKLING:
            self._attributes(bound, line)
        elif isinstance(bound, (operator.attrgetter, operator.itemgetter)):
            self._object(bound, args, line)
        elif not is_container(bound):
            self._native(name, bound, path, line)
        elif isinstance(bound, dict) and name in _BY_KEY and args and _hashable(args[0]):
            record.item(bound, args[0], path, line)
        elif isinstance(bound, dict) and name in _ONE_ITEM and args and _hashable(args[0]):
            record.item(bound, args[0], path, line)
            if (args[0] in bound) is (name == "pop"):
                record.mutated(bound, line)
                record.wrote(OutsidePlace("item", bound, args[0]), line=line)
        elif name == "__contains__":
            self.contains(bound, args[0], line)
        elif isinstance(bound, dict) and name == "__setitem__":
            self.store_item(bound, args[0], line)
        elif name == "clear" and isinstance(bound, dict) and record.goes_by_keys(bound):
            self._take_out_all(bound, path, line)
        elif name in _ADDING or (discarded and name in _CHANGING - _BY_CONTENTS):
            record.mutated(bound, line)
            if name == "clear":
                record.emptied(bound)
            if isinstance(bound, dict) and name not in _ADDING:
                record.reordered(bound, line)
        elif name == "__len__":
            record.size(bound, path, line)
        else:
            record.contents(bound, path, line, name not in _GIVING_ITEMS)
            of_bytes = hasattr(type(bound), "tobytes")
            if name in _CHANGING or (of_bytes and name in native.CHANGING_ARRAYS):
                record.mutated(bound, line)

    def _take_out_all(self, table: dict[Any, Any], path: str, line: SourceLine) -> None:
        """Records that a dictionary is emptied whose keys are guarded: each call empties it."""
        self._record.read(OutsidePlace("keys", table), f"the keys of {path}", line)
        self._record.mutated(table, line)
        for key in table:
            self._record.wrote(OutsidePlace("item", table, key), line=line)

    def _native(self, name: str, bound: Any, path: str, line: SourceLine) -> None:
        """Records a method call on a native object other than a container."""
        self._all([bound], line)
        if native.is_read_only(bound) and native.changes(bound, name):
            raise HostWork.READ.refused(path, users(line))
        if native.changes(bound, name):
            self._record.unrepeated.add(path, line)
        elif isinstance(bound, bytearray):
            self._record.mutated(bound, line)
        elif native.advances(bound, name):
            self._record.iterator(bound, path, line)
        elif name == "acquire" and native.is_lock(bound):
            self._record.unrepeated.locks(bound, path, line)

    def _give(self, values: Sequence[Any], line: SourceLine) -> None:
        """Records that unobserved code gets objects, which it may read and change."""
        self._pin(values)
        self._note_given(values, line)

    def _note_given(self, values: Sequence[Any], line: SourceLine) -> None:
        record = self._record
        for value in values:
            if isinstance(value, types.BuiltinMethodType) and value.__self__ is not None:
                bound, changes = value.__self__, native.changes(value.__self__, value.__name__)
            else:
                bound, changes = value, native.is_file(value)
            if native.is_read_only(bound) and record.is_outside(bound):
                raise HostWork.READ.refused(record.path(bound, "a file"), users(line))
            if changes and record.is_outside(bound) and native.is_file(bound):
                raise HostWork.WRITE.refused(record.path(bound, type(bound).__name__))
            if changes and record.is_outside(bound):
                record.unrepeated.add(record.path(bound, type(bound).__name__), line)
            elif native.is_iterator(value) and record.is_outside(value):
                self._advance(value, line)

    def contains(self, container: Any, key: Any, line: SourceLine) -> None:
        """Records a membership test, `key in container`."""
        record = self._record
        shown = record.viewed(container)
        if not record.is_outside(shown) or not is_read(shown):
            return
        if shown is not container and not isinstance(container, (_KEYS, types.MappingProxyType)):
            record.contents(shown, record.path(shown, type(shown).__name__), line)
            return
        container = shown
        path = record.path(container, type(container).__name__)
        if isinstance(container, (dict, set, frozenset)) and isinstance(key, torch.Tensor):
            record.read(OutsidePlace("has", container, key), f"<Parameter> in {path}", line)
        elif isinstance(container, dict) and _hashable(key):
            record.read(OutsidePlace("has", container, key), f"{key_text(key)} in {path}", line)
        else:
            record.contents(container, path, line)

    def store_item(self, container: Any, key: Any, line: SourceLine) -> None:
        """Records a write of `container[key]`."""
        record = self._record
        if not is_container(container) or not record.is_outside(container):
            return
        if isinstance(container, dict) and key not in container:
            record.mutated(container, line)
        if isinstance(container, list) and isinstance(key, int) and key < 0:
            record.size(container, record.path(container, "list"), line)
            key += len(container)
        record.pin(key)
        if _hashable(key):
            record.wrote(OutsidePlace("item", container, key), line=line)
        else:
            record.mutated(container, line)

    def method(self, callee: Any, line: SourceLine) -> None:
        """Records a call of a bound method."""
        if isinstance(callee, types.MethodType) and self._record.is_outside(callee):
            path = self._record.path(callee, getattr(callee, "__name__", "method"))
            self._record.read(
                OutsidePlace("attribute", callee, "__self__"), f"{path}.__self__", line
            )
            self._record.read(OutsidePlace("attribute", callee, "__func__"), path, line)

    def _partial(
        self, callee: functools.partial[Any], args: Sequence[Any], line: SourceLine
    ) -> None:
        record = self._record
        if record.is_outside(callee):
            path = record.path(callee, "partial")
            for name in ("func", "args", "keywords"):
                record.read(OutsidePlace("attribute", callee, name), f"{path}.{name}", line)
            record.contents(callee.args, f"{path}.args", line, nested=False)
            record.contents(callee.keywords, f"{path}.keywords", line, nested=False)
        self.call(callee.func, [*callee.args, *args, *callee.keywords.values()], line)

    def _object(self, callee: Any, args: Sequence[Any], line: SourceLine) -> None:
        """Records a call of a callable object, by its class."""
        if isinstance(callee, (operator.attrgetter, operator.itemgetter)):
            for value in args:
                self._attributes(value, line, depth=4)
        elif isinstance(callee, weakref.ref):
            self._target(callee, line)
        elif isinstance(callee, functools._lru_cache_wrapper):
            self._remembered(callee, args, line)
        else:
            read_method(self._record, type(callee), "__call__", line)
            if not isinstance(type(callee).__call__, types.FunctionType):
                self._give(args, line)
        self._all(args, line)

    def _target(self, reference: weakref.ref[Any], line: SourceLine) -> None:
        """Records that a weak reference is dereferenced."""
        if self._record.is_outside(reference):
            path = self._record.path(reference, "a weak reference")
            self._record.read(OutsidePlace("target", reference), f"{path}()", line)

    def _remembered(
        self, function: functools._lru_cache_wrapper[Any], args: Sequence[Any], line: SourceLine
    ) -> None:
        """Records a call of a function with a cache, such as `functools.lru_cache`."""
        self._pin(args)
        if self._record.is_outside(function):
            self._record.unrepeated.remembers(function)
            path = self._record.path(function, getattr(function, "__name__", "a function"))
            known = OutsidePlace("remembers", function, filled(function))
            self._record.read(known, f"the cache of {path}", line)

    def _attributes(self, value: Any, line: SourceLine, depth: int = 1) -> None:
        """Records reads of all attributes of an outside object, and of objects in them."""
        record = self._record
        path = record.path(value, type(value).__name__)
        if is_container(value):
            record.contents(value, path, line)
        attributes = attributes_of(value)
        if attributes is None or isinstance(value, types.ModuleType):
            return
        if not record.is_outside(value) or isinstance(value, (type, torch.nn.Module)):
            return
        for name in list(attributes):
            read_attribute(record, value, name, f"{path}.{name}", line)
            if depth > 1 and not is_value(attributes[name]):
                self._attributes(attributes[name], line, depth - 1)

    def _advance(self, iterator: Any, line: SourceLine) -> None:
        path = self._record.path(iterator, type(iterator).__name__)
        self._record.iterator(iterator, path, line)

    def _pin(self, values: Sequence[Any]) -> None:
        """Requires the same objects, and those nested in them, in each call."""
        for value in values:
            if type(value) in (list, tuple, set) and len(value) <= _FEW:
                self._pin(list(value))
            elif type(value) is dict and len(value) <= _FEW:
                self._pin(list(value.values()))
            else:
                self._record.pin(value)

    def _all(self, values: Sequence[Any], line: SourceLine, nested: bool = True) -> None:
        record = self._record
        read = (value for value in values if not _changes(value))
        for value in map(record.viewed, read):
            if is_read(value) and record.is_outside(value):
                record.contents(value, record.path(value, type(value).__name__), line, nested)


def _changes(value: Any) -> bool:
    """True if a value is a method that changes its container."""
    named = isinstance(value, types.BuiltinMethodType)
    return named and value.__name__ in _ADDING | _CHANGING


def is_untraced(function: types.FunctionType) -> bool:
    """True if a function's instructions are not observed."""
    return not is_observed(function.__code__.co_filename)


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return not isinstance(key, slice)
