"""The mutable objects that a step can reach through arguments, closure, `self` and globals.

    step ──▶ closure cells, defaults, the globals that it names ──▶ functions, objects, containers
    objects ──▶ attributes, slots; of the user's classes also attributes and what methods name
    arguments ──▶ modules, optimizers, objects, lists, dictionaries ──▶ …

Nearest first, and no more than `_LIMIT` objects. Containers of more than `_LARGE` items (data sets)
are looked at, but not what is in them. Objects that other threads may be changing (queues, whatever
holds a lock or a thread) are left alone, as are loggers, files and modules of Python.
"""

from __future__ import annotations

import array
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat import frames
from graphopt.ir.user_frames import is_installed, is_library_file
from graphopt.tracing.outside.changed_containers import PUT_BACK
from graphopt.tracing.rollback import contents
from graphopt.tracing.rollback.contents import NamespacePart, ObjectKind
from graphopt.tracing.rollback.generators import is_generator

_LIMIT = 200_000
_LARGE = 10_000

_ATOMIC = frozenset(
    {int, float, bool, complex, str, bytes, type(None), type(...), range, slice, property}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
    | {CodeType, GetSetDescriptorType, MemberDescriptorType}
)
_LEFT_ALONE = frozenset(
    {"threading", "_thread", "queue", "_queue", "multiprocessing", "concurrent", "asyncio"}
)
"""Packages of objects that other threads work with."""
_OF_COMPILERS = (
    "torch._ops",
    "torch._library",
    "torch.fx.",
    "torch._subclasses.",
    "torch._dynamo.",
    "torch._functorch.",
)
"""Modules of objects that hold what torch knows of operators, graphs and fake tensors."""
_OF_MODES = frozenset({"torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode",
                       "torch.cpu.amp.autocast_mode", "torch.autograd.grad_mode"})  # fmt: skip
"""Modules of objects that note in themselves which mode was on before they were entered."""
_NOT_ENTERED = _LEFT_ALONE | {
    "logging",
    "io",
    "_io",
    "socket",
    "weakref",
    "_weakref",
    "graphopt",
    "sympy",
}

Found = tuple[ObjectKind, Any]


class _ReachableSearch:
    """One search for the objects that `step` can reach. `keep` holds what has been seen, so that no
    `id` is used twice; `bound` methods lead to their objects."""

    def __init__(self, step: Any, arguments: Iterable[object], bound: bool = False) -> None:
        self.namespace = getattr(_function_of(step), "__globals__", {})
        self.seen: set[int] = set()
        self.keep: list[object] = []
        self.pending: deque[object] = deque()
        self.slots: dict[type, tuple[str, ...]] = {}
        self.bound = bound
        self.add([step, *arguments])

    def add(self, values: Iterable[object]) -> None:
        self.pending.extend(value for value in values if type(value) not in _ATOMIC)

    def run(self) -> Iterator[Found]:
        while self.pending and len(self.keep) < _LIMIT:
            value = self.pending.popleft()
            if id(value) not in self.seen:
                self.seen.add(id(value))
                self.keep.append(value)
                yield from self._visit(value)

    def _visit(self, value: Any) -> Iterator[Found]:
        kind = _kind_of(value)
        if kind is not None:
            yield kind, value
        if kind is contents.GENERATOR or kind is contents.ARRAY:
            return
        if isinstance(value, _HOLDERS):
            self._add_items(value)
        if type(value) in _WITHOUT_ATTRIBUTES:
            return
        if isinstance(value, (CellType, MethodType, partial, BuiltinFunctionType)):
            if isinstance(value, partial):
                yield contents.TABLE, vars(value)
            self.add(_held_by(value))
            if self.bound and isinstance(value, BuiltinFunctionType):
                self.add([value.__self__])
        elif isinstance(value, FunctionType):
            yield from self._visit_function(value)
        elif isinstance(value, type):
            yield from self._visit_class(value)
        elif isinstance(value, ModuleType):
            if _is_users_module(value) and _is_entered(type(value)):
                yield contents.TABLE, vars(value)
        else:
            yield from self._visit_object(value)

    def _add_items(self, value: Any) -> None:
        if isinstance(value, dict):
            if dict.__len__(value) <= _LARGE:
                self.add(dict.keys(value))
                self.add(dict.values(value))
        elif len(value) <= _LARGE:
            self.add(value)

    def _visit_function(self, function: FunctionType) -> Iterator[Found]:
        self.add(function.__closure__ or ())
        self.add(function.__defaults__ or ())
        self.add((function.__kwdefaults__ or {}).values())
        users = function.__globals__ is self.namespace or _is_users(function.__code__.co_filename)
        if users or function.__dict__:
            yield contents.TABLE, function.__dict__
            self.add(function.__dict__.values())
        if users:
            yield from self._visit_globals(function)

    def _visit_globals(self, function: FunctionType) -> Iterator[Found]:
        """Visits the globals that a function names, in its module and the user's other modules."""
        names = tuple(dict.fromkeys(names_in(function.__code__)))
        spaces = [function.__globals__]
        for value in map(function.__globals__.get, names):
            if not isinstance(value, ModuleType) or not _is_entered(type(value)):
                continue
            if _is_users(getattr(value, "__file__", None)):
                spaces.append(vars(value))
        for space in spaces:
            yield (
                contents.NAMES,
                NamespacePart(space, names, space.get, space.__setitem__, space.__delitem__),
            )
            self.add(space[name] for name in names if name in space)

    def _visit_class(self, kind: type) -> Iterator[Found]:
        """Visits the attributes of a user's class, and what its methods name."""
        for base in kind.__mro__:
            if _is_library(base) or (id(base) in self.seen and base is not kind):
                continue
            self.seen.add(id(base))
            yield contents.NAMES, _attributes_of(base)
            values = list(vars(base).values())
            self.add(value for value in values if type(value) in _CONTAINERS)
            if _is_users(_file_of(base)):
                self.add(map(_function_in, values))

    def _visit_object(self, value: Any) -> Iterator[Found]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.add(_compat.functions_of_hooks(value))
        if not _is_entered(kind) and not isinstance(value, nn.Module):
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict:
            attributes = {}
        elif not isinstance(value, (nn.Module, Optimizer)) and is_shared(attributes):
            return
        elif not isinstance(value, torch.Tensor) or kind in (torch.Tensor, nn.Parameter):
            yield contents.TABLE, attributes
            self.add(attributes.values())
        if kind not in self.slots:
            self.slots[kind] = _slots_of(kind)
            if not _is_library(kind):
                self.pending.append(kind)
        if self.slots[kind]:
            slots = _slots_in(value, self.slots[kind])
            yield contents.NAMES, slots
            self.add(contents.NAMES.read(slots))


def reachable(step: Any, arguments: Iterable[object]) -> Iterator[Found]:
    """The mutable objects that `step` can reach, with their kinds; each once.

    The modes of torch come first, as one object.
    """
    yield contents.MODES, None
    yield from _ReachableSearch(step, arguments).run()


def trained_objects(step: Any, arguments: Iterable[object]) -> list[nn.Module | Optimizer]:
    """The optimizers that `step` can reach, and the outermost modules whose parameters they
    update; without optimizers, all modules that get gradients."""
    search = _ReachableSearch(step, arguments)
    for _ in search.run():
        pass
    optimizers = [value for value in search.keep if isinstance(value, Optimizer)]
    modules = [value for value in search.keep if isinstance(value, nn.Module)]
    updated = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    trained = [
        module
        for module in modules
        if any(p.requires_grad and (not updated or id(p) in updated) for p in module.parameters())
    ]
    inner = {id(child) for module in trained for child in module.modules() if child is not module}
    return [*(module for module in trained if id(module) not in inner), *optimizers]


class ReachableObjects:
    """The objects and names that a function can reach.

    Args:
        known: the objects, by id; None where there are more than are looked at.
        held: these objects themselves.

    Attributes:
        functions: those among them.
    """

    def __init__(self, known: set[int] | None, held: Sequence[object] = ()) -> None:
        self._known = known
        self.functions = [value for value in held if isinstance(value, FunctionType)]

    def has(self, value: object) -> bool:
        """True if the search reached a value."""
        return self._known is None or id(value) in self._known

    def sets(self, namespace: object, name: object) -> bool:
        """True if a reached function sets a global variable."""
        return any(name in frames.stored_globals(code) for code in self._codes(namespace))

    def names(self, namespace: object, name: object) -> bool:
        """True if a reached function names a global variable."""
        return any(name in code.co_names for code in self._codes(namespace))

    def _codes(self, namespace: object) -> Iterator[CodeType]:
        """The code objects of reached functions that have these globals."""
        for function in self.functions:
            if function.__globals__ is namespace:
                yield from codes_in(function.__code__)


def reached_from(function: Any, arguments: Iterable[object]) -> ReachableObjects:
    """Everything that `function` can reach from its closure, arguments and globals."""
    search = _ReachableSearch(function, arguments, bound=True)
    held = {id(value) for _, value in search.run()}
    return ReachableObjects(None if search.pending else search.seen | held, search.keep)


def _function_of(step: Any) -> Any:
    while isinstance(step, (partial, MethodType)):
        step = step.func if isinstance(step, partial) else step.__func__
    return step if isinstance(step, FunctionType) else type(step).__call__


_CONTAINERS: dict[type, ObjectKind] = {
    dict: contents.TABLE,
    OrderedDict: contents.TABLE,
    defaultdict: contents.TABLE,
    list: contents.LIST,
    set: contents.SET,
    deque: contents.QUEUE,
    bytearray: contents.BYTES,
    array.array: contents.NUMBERS,
}


_HOLDERS = (dict, list, set, deque, tuple, frozenset)
_WITHOUT_ATTRIBUTES = frozenset({*_CONTAINERS, tuple, frozenset}) - {OrderedDict}


def _kind_of(value: object) -> ObjectKind | None:
    """The kind of a mutable object, or None for an object that only refers to others."""
    exact = _CONTAINERS.get(type(value))
    if exact is not None:
        return exact
    if isinstance(value, CellType):
        return contents.CELL
    if isinstance(value, (dict, list, set, deque, bytearray)):
        return next(kind for base, kind in _CONTAINERS.items() if isinstance(value, base))
    if is_generator(value):
        return contents.GENERATOR
    return contents.ARRAY if _is_array(value) else None


def _held_by(value: Any) -> list[object]:
    """The objects that a cell or callable object refers to."""
    if isinstance(value, CellType):
        return [contents.CELL.read(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords, *vars(value).values()]
    return [value.__self__] if isinstance(value.__self__, random.Random) else []


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function, or one nested in it, may read from its module."""
    for each in codes_in(code):
        yield from each.co_names


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _is_entered(kind: type) -> bool:
    name = kind.__module__
    if name in _OF_MODES or name.startswith(_OF_COMPILERS):
        return False
    return name.partition(".")[0] not in _NOT_ENTERED


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _is_library(kind: type) -> bool:
    file = _file_of(kind)
    return kind.__module__ == "builtins" if file is None else is_library_file(file)


def _is_users(file: str | None) -> bool:
    """True if a file is the user's own, not one of an installed package."""
    return file is not None and not is_installed(file) and not is_library_file(file)


def _is_users_module(module: ModuleType) -> bool:
    """True if a module is the user's own, also one made by a program."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__spec__ is None and module.__name__ not in sys.builtin_module_names
    return _is_users(file)


def _function_in(attribute: Any) -> Any:
    """The plain function behind a method, static method, class method or property."""
    if isinstance(attribute, property):
        return attribute.fget
    return getattr(attribute, "__func__", attribute if callable(attribute) else None)


def _attributes_of(kind: type) -> NamespacePart:
    return NamespacePart(
        kind,
        tuple(n for n, v in vars(kind).items() if _is_value(n, v)),
        vars(kind).get,
        partial(type.__setattr__, kind),
        partial(type.__delattr__, kind),
    )


def _is_value(name: str, value: object) -> bool:
    """True if a class attribute is a value, not a method or slot."""
    if name == "_abc_impl" or (name.startswith("__") and name.endswith("__")):
        return False
    return not callable(value) and not hasattr(type(value), "__get__")


def _slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class's objects, by name."""
    return tuple(
        name
        for base in kind.__mro__[:-1]
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    )


def _slots_in(value: Any, names: tuple[str, ...]) -> NamespacePart:
    write, drop = partial(object.__setattr__, value), partial(object.__delattr__, value)
    return NamespacePart(value, names, partial(getattr, value), write, drop)


def is_shared(attributes: dict[str, Any]) -> bool:
    """True if an object with these attributes is used by several threads."""
    return any(
        type(value).__module__.partition(".")[0] in _LEFT_ALONE for value in attributes.values()
    )


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    array: Any = value
    return bool(array.flags.writeable and array.nbytes <= PUT_BACK)
