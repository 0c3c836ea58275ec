"""Static search of a step's bytecode for the modules, optimizers and tensors that it names.

A trace that meets one of them has to be done anew (`implicit`). Most steps name theirs in so many
words, and the first trace may have them as inputs from the beginning:

    def step(batch):                      model ────────────▶ a module
        loss = model(batch).sum()         trainer ─▶ a plain object
        loss.backward()                     its class ─▶ update ─▶ self.optimizer ─▶ an optimizer
        trainer.update()

What is named is only looked at: no attribute is computed, nothing is called. What stands under an
`if` or in a `while` is left out, for it may not be used; so is what a subscript or a call gives.
Whether a trace has used what was found is seen behind it (`remembered.idle_in`), and how the step
gets there is guarded as if nothing had been known.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.ir.user_frames import is_library_file
from graphopt.tracing.inputs.implicit import EarlierInputs
from graphopt.tracing.outside.places import MISSING, OutsidePlace, attributes_of

_DEEPEST = 8
_MOST_CODES = 400
_MOST_ITEMS = 16


class _NamedValue(NamedTuple):
    """A value with the path by which the code reaches it."""

    path: str
    value: Any


class _CodeRead(NamedTuple):
    """A read in bytecode: a variable, a chain of attributes, and possibly iteration over the
    result."""

    variable: str
    is_global: bool
    attributes: tuple[str, ...]
    items: bool


def named_in(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EarlierInputs:
    """The objects that the code of a step, and of functions it calls, reaches by name.

    Args:
        args, kwargs: with which it is called.
    """
    search = _CodeSearch()
    search.call(_NamedValue("", fn), _given(fn, args, kwargs), _DEEPEST)
    return EarlierInputs(search.objects, search.tensors)


def _given(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, _NamedValue]:
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {}
    return {name: _NamedValue(name, value) for name, value in bound.arguments.items()}


class _CodeSearch:
    def __init__(self) -> None:
        self.objects: list[tuple[str, weakref.ref[Any]]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._seen: set[tuple[int, int]] = set()

    def call(self, called: _NamedValue, variables: dict[str, _NamedValue], depth: int) -> None:
        """Collects the objects that a function names.

        Args:
            called: the function, a method, or an object that can be called.
            variables: what is known of its variables.
            depth: how many functions deep it may be followed.
        """
        path, value = called
        while not isinstance(value, FunctionType):
            if isinstance(value, MethodType):
                owner = _NamedValue(path.rpartition(".")[0] or "self", value.__self__)
                value = value.__func__
                if isinstance(value, FunctionType) and value.__code__.co_argcount:
                    variables = {value.__code__.co_varnames[0]: owner, **variables}
            elif isinstance(value, partial):
                value = value.func
            elif isinstance(value, (type, nn.Module, Optimizer, torch.Tensor)):
                return
            else:
                value, path = _attribute(value, "__call__"), f"{path}.__call__"
                if not isinstance(value, MethodType):
                    return
        inner = getattr(value, "__wrapped__", None)
        if isinstance(inner, FunctionType):  # by a decorator, such as `torch.no_grad()`
            value = inner
        if depth and not is_library_file(value.__code__.co_filename):
            self._code(value, value.__code__, variables, depth)

    def _code(
        self, function: FunctionType, code: CodeType, variables: dict[str, _NamedValue], depth: int
    ) -> None:
        owner = next(iter(variables.values()), None)
        key = (id(code), id(owner.value) if owner else 0)
        if key in self._seen or len(self._seen) == _MOST_CODES:
            return
        self._seen.add(key)
        known = variables | _cells(function)
        for read in _reads(code):
            for found in _followed(read, known, function.__globals__):
                self._note(found, read, depth)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(function, constant, known, depth)

    def _note(self, found: _NamedValue, read: _CodeRead, depth: int) -> None:
        path, value = found
        if isinstance(value, (nn.Module, Optimizer)):
            self.objects.append((path, weakref.ref(value)))
        elif isinstance(value, torch.Tensor):
            if _is_plain(value):
                self.tensors.append((path, value))
        elif read.items:
            items = value[:_MOST_ITEMS] if type(value) in (list, tuple) else ()
            for key, item in enumerate(items):
                if isinstance(item, (nn.Module, Optimizer)):
                    self.objects.append((f"{path}[{key}]", weakref.ref(item)))
        elif callable(value):
            self.call(found, {}, depth - 1)


def _cells(function: FunctionType) -> dict[str, _NamedValue]:
    """The variables of a function's closure that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {name: OutsidePlace("cell", cell).now() for name, cell in cells}
    return {name: _NamedValue(name, v) for name, v in found.items() if v is not MISSING}


def _is_plain(tensor: torch.Tensor) -> bool:
    usual = type(tensor) in (torch.Tensor, nn.Parameter)
    return usual and tensor.is_leaf and tensor.layout is torch.strided


def _followed(
    read: _CodeRead, variables: dict[str, _NamedValue], globals_: dict[str, Any]
) -> Iterator[_NamedValue]:
    """Yields the modules and optimizers along a read, and its result, as far as known without
    running code."""
    path, value = read.variable, globals_.get(read.variable, MISSING)
    if not read.is_global:
        path, value = variables.get(read.variable, (path, MISSING))
    for name in read.attributes:
        if isinstance(value, (nn.Module, Optimizer)):
            yield _NamedValue(path, value)
        path, value = f"{path}.{name}", _attribute(value, name)
    if value is not MISSING:
        yield _NamedValue(path, value)


def _attribute(value: Any, name: str) -> Any:
    """Reads a stored attribute, without properties and `__getattr__`."""
    if not isinstance(value, type):
        tables = _compat.own_tables(value) if isinstance(value, nn.Module) else ()
        for table in (attributes_of(value) or {}, *tables):
            if name in table:
                return table[name]
    kind = value if isinstance(value, type) else type(value)
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)
    if isinstance(found, classmethod):
        return MethodType(found.__func__, kind)
    if isinstance(found, (FunctionType, staticmethod)):
        return found.__get__(None if value is kind else value, kind)
    return MISSING if hasattr(type(found), "__get__") else found


@lru_cache(maxsize=1024)
def _reads(code: CodeType) -> tuple[_CodeRead, ...]:
    """The reads that each execution of a code object makes, as far as known."""
    found: dict[_CodeRead, None] = {}
    current: _CodeRead | None = None
    for instruction in _executed(code):
        name, argument = instruction.opname, instruction.argval
        if name in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
            continue
        if current is not None and name in ("LOAD_ATTR", "LOAD_METHOD"):
            current = current._replace(attributes=(*current.attributes, argument))
            continue
        if current is not None:
            found[current._replace(items=name == "GET_ITER")] = None
        is_variable = name.startswith(_VARIABLES) and not name.startswith("LOAD_FAST_LOAD")
        is_global = name in ("LOAD_GLOBAL", "LOAD_NAME")
        current = _CodeRead(argument, is_global, (), False) if is_variable else None
    return tuple(found)


_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")


def _executed(code: CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions that no condition skips."""
    until = -1
    for instruction in dis.get_instructions(code):
        name, inside = instruction.opname, instruction.offset < until
        goes_on = instruction.opcode in _JUMPS and instruction.argval > instruction.offset
        if goes_on and ("IF" in name or (inside and name == "JUMP_FORWARD")):
            until = max(until, instruction.argval)  # the end of a branch jumps over the other one
        if not inside:
            yield instruction


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
