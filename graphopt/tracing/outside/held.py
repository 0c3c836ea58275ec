"""Guarded objects outside a step, and when an equal object may replace one.

A configuration that is made anew for every call is another object with equal contents. What the
step reads of it is guarded itself, so the new object is as good as the one before where all of that
is found in it again: the guard follows from place to place, as the program does.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import Any

from torch import nn

from graphopt import _compat
from graphopt._compat.classes import is_made_by_statement
from graphopt._compat.disabled_functions import undisabled
from graphopt.guards.values import is_plain
from graphopt.tracing.bytecode.accesses import is_observed
from graphopt.tracing.outside.places import MISSING, OutsidePlace, OutsideRead, is_value, same

CONTAINERS = frozenset({dict, list, set, deque, defaultdict, OrderedDict})


class GuardedObject:
    """A guarded object, held weakly unless it is a value, class or container.

    Attributes:
        owner: the object that it is a part of, and with which it is found: the attributes of an
            object, a cell of a function's closure.
        followed: another object may take its place.
        description: of a module that is followed; see `modules.description_of`.
    """

    __slots__ = (
        "_globals",
        "_gone",
        "_makes",
        "_object",
        "_part",
        "_type",
        "description",
        "followed",
        "owner",
        "weak",
    )

    def __init__(
        self,
        value: Any,
        gone: Callable[[GuardedObject], None],
        owner: GuardedObject | None,
        pinned: bool,
    ) -> None:
        self._gone, self._type, self.owner = gone, type(value), owner
        self._makes = _default_of(value)
        self._part = None if owner is None else _part(owner.get(), value)
        self._globals = value.__globals__ if isinstance(value, types.FunctionType) else None
        self.description = None
        if isinstance(value, nn.Module) and not pinned:
            self.description = description_of(value)
        self.followed = not pinned and (self.description is not None or can_follow(value))
        self.weak = False
        self._object: Any = None
        if owner is None:
            self.take(value)

    def take(self, value: Any) -> None:
        """Replaces the guarded object."""
        self.weak, self._object = False, value
        fixed = is_value(value) or is_plain(value)
        if fixed or isinstance(value, (type, types.ModuleType, frozenset)):
            return
        try:
            self._object, self.weak = weakref.ref(value, self._lost), True
        except TypeError:
            return

    def get(self) -> Any:
        """The guarded object; `MISSING` if it was freed."""
        if self.owner is not None:
            return self.within(self.owner.get())
        if not self.weak:
            return self._object
        value = self._object()
        return MISSING if value is None else value

    def within(self, owner: Any) -> Any:
        """The corresponding part of another owner."""
        try:
            return vars(owner) if self._part is None else owner.__closure__[self._part]
        except (AttributeError, TypeError, IndexError):
            return MISSING

    def within_wrapper(self, value: Any) -> Any:
        """The guarded function if `value` is a `torch.compiler.disable` wrapper of it, else
        `value`."""
        mine = self.get()
        alike = type(value) is types.FunctionType is type(mine)
        return mine if alike and undisabled(value) is undisabled(mine) else value

    def may_become(self, value: Any) -> bool:
        """True if another object may replace this one, given that guarded reads in it agree."""
        if not self.followed or type(value) is not self._type:
            return False
        if _default_of(value) is not self._makes:
            return False
        if _is_marked_value(value):
            return bool(value == self._object)
        if self.description is not None:
            return same(description_of(value), self.description)
        return self._globals is None or value.__globals__ is self._globals

    def is_changed(self) -> bool:
        """True if the guarded module has changed."""
        value = self.get()
        return value is not MISSING and not self.may_become(value)

    def release(self) -> None:
        """Drops strong references; the object is then found by its place."""
        if self.weak or self.owner is not None or _is_marked_value(self._object):
            return
        if self.followed:
            self._object = MISSING

    @property
    def reference(self) -> Any:
        return self._object

    @property
    def root(self) -> GuardedObject:
        """The outermost owner of this object, or the object itself."""
        return self if self.owner is None else self.owner.root

    def _lost(
        self, reference: weakref.ref[Any], ending: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        # When Python ends, objects go after the globals of the modules that would see to it.
        if reference is self._object and not ending():
            self._gone(self)


def can_follow(value: Any) -> bool:
    """True if a step can only use an object of this kind by reads that are observed."""
    if type(value) in CONTAINERS:
        return True
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, tuple)):
        return True
    if _is_marked_value(value) or type(value) is weakref.ReferenceType:
        return True
    if type(value).__module__ == "numpy" or type(value) is types.SimpleNamespace:
        return True
    return not isinstance(value, type) and is_plain_class(type(value))


def is_object(value: Any) -> bool:
    """True if an argument is an object of a user's class that consists of its attributes."""
    if isinstance(value, Enum) or is_value(value) or callable(value):
        return False
    if type(value).__module__.partition(".")[0] == "numpy":
        return False
    plain = is_made_by_statement(type(value)) or type(value) is types.SimpleNamespace
    return bool(plain) and can_follow(value)


def _is_marked_value(value: Any) -> bool:
    """True if a value is a number or text of a class that may have attributes."""
    return is_plain(value) and not isinstance(value, tuple)


def is_plain_class(kind: type) -> bool:
    """True if a class's objects consist of their attributes alone."""
    if kind.__module__.partition(".")[0] == "torch":
        return False
    if not all(map(_is_followed, kind.__mro__)):
        return False
    return all(
        each is object
        or (is_made_by_statement(each) and ("__dict__" in vars(each) or "__slots__" in vars(each)))
        or (is_made_by_statement(each) and each.__basicsize__ == _size_of_base(each))
        for each in kind.__mro__
    )


def _size_of_base(kind: type) -> int:
    return 0 if kind.__base__ is None else kind.__base__.__basicsize__


def _is_followed(kind: type) -> bool:
    """True if the methods of a class are observed."""
    if kind.__module__ in _HARMLESS:
        return True
    methods = (each for each in vars(kind).values() if isinstance(each, types.FunctionType))
    return all(is_observed(method.__code__.co_filename) for method in methods)


_HARMLESS = frozenset({"typing", "abc"})
"""Modules of base classes whose methods read nothing of an object."""


def _default_of(value: Any) -> Any:
    """The factory of a `defaultdict`, else None."""
    return value.default_factory if isinstance(value, defaultdict) else None


def _part(owner: Any, value: Any) -> int | None:
    closure = owner.__closure__ if isinstance(owner, types.FunctionType) else None
    return next((n for n, cell in enumerate(closure or ()) if cell is value), None)


class GuardedPlace:
    """A place with its expected value.

    Attributes:
        held: the object that is there; None for values, which are compared as such.
    """

    def __init__(
        self, read: OutsideRead, holder: GuardedObject, held: GuardedObject | None
    ) -> None:
        self.kind, self.key = read.place.kind, read.place.key
        self.path, self.line = read.path, read.line
        self.holder, self.held = holder, held
        self.value = read.value if held is None else None
        self._wrapper: Callable[[], Any] | None = None

    def expected(self) -> Any:
        if self.held is None:
            return self.value
        return self.held.get() if self._wrapper is None else self._wrapper()

    @property
    def reference(self) -> Any:
        """A weak reference to the expected object, if it is held weakly."""
        return self._wrapper or (self.held and self.held.reference)

    def found(self, value: Any) -> None:
        """Accepts `value` as the expected value from now on."""
        if self.held is None:
            self.value = value
        else:
            self._wrapper = None if value is self.held.get() else weakref.ref(value)

    def holds(self) -> bool:
        return same(OutsidePlace(self.kind, self.holder.get(), self.key).now(), self.expected())


_TABLES = ("_parameters", "_buffers")
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType)


def description_of(module: nn.Module) -> tuple[Any, ...] | None:
    """A description of a module that is equal for modules that compute the same.

    None where that cannot be said: it has a tensor, a hook, or an attribute that is neither a
    number, text or the like nor a function or class.
    """
    found: list[Any] = [type(module)]
    for name, value in vars(module).items():
        part = _children(value) if name == "_modules" else _attribute(name, value)
        if part is None:
            return None
        found.append((name, *part))
    return tuple(found)


def _children(modules: dict[str, nn.Module | None]) -> tuple[Any, ...] | None:
    children = [(n, m if m is None else description_of(m)) for n, m in modules.items()]
    if any(m is None and modules[n] is not None for n, m in children):
        return None
    return tuple(children)


def _attribute(name: str, value: Any) -> tuple[Any, ...] | None:
    if name in _TABLES:
        return tuple(value) if not any(each is not None for each in value.values()) else None
    if is_value(value) or isinstance(value, _BY_IDENTITY):
        return (value,)
    return () if isinstance(value, (dict, set, list)) and not value else None


def only_within(module: nn.Module, others: Iterable[nn.Module]) -> Collection[int] | None:
    """The ids of a module and its submodules; None if one of `others` shares a submodule."""
    within = set(map(id, module.modules()))
    for other in others:
        if id(other) not in within and not within.isdisjoint(
            map(id, _compat.own_modules(other).values())
        ):
            return None
    return within
