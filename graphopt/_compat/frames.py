"""The operands of the instruction that a Python frame executes next (CPython 3.10 to 3.13).

A tracing function gets the frame, but not the stack that its instructions work on. The stack is
read where CPython keeps it: next to the local variables, in the frame.

    3.10        PyFrameObject: code, …, pointer to the stack, …, its depth
    3.11        PyFrameObject -> frame: function, globals, …, code, …, depth, …, variables, stack
    3.12, 3.13  PyFrameObject -> frame: code, …, function, globals, …, variables, stack

From 3.12 on the depth is not stored while a frame runs: the instruction's position gives it.
"""

from __future__ import annotations

import ctypes
import dis
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any

_VERSION = sys.version_info[:2]
_WORD = ctypes.sizeof(ctypes.c_void_p)
_HAS_STACK_POINTER = _VERSION < (3, 12)
NULL = object()
"""Stands for a place on the stack that holds nothing."""


class Operands:
    """The operands on the stack of a frame: `top(1)` is the topmost, `top(2)` the one below, ….

    Valid only while the frame is about to execute that instruction.
    """

    __slots__ = ("code", "function", "stack", "variables")

    def __init__(self, frame: FrameType, offset: int) -> None:
        self.code = code = frame.f_code
        address = id(frame)
        self.function: FunctionType | None = None
        if _VERSION == (3, 10):
            stack = _word(address + 8 * _WORD)
            self.variables = stack - _WORD * _variables(code)
            self.stack = stack + _WORD * _integer(address + 10 * _WORD)
            return
        inner = _word(address + 3 * _WORD)
        self.variables = inner + 9 * _WORD
        self.function = _object(inner + (0 if _VERSION == (3, 11) else 2 * _WORD))
        depth = _variables(code)
        if _HAS_STACK_POINTER:
            depth = _integer(inner + 8 * _WORD)
        else:
            depth += _depths(code).get(offset, 0)
        self.stack = self.variables + _WORD * depth

    def top(self, place: int) -> Any:
        """The object at a stack position, counted from the top starting at 1, or `NULL`."""
        return _object(self.stack - place * _WORD)

    def put(self, place: int, value: Any) -> None:
        """Replaces an object on the frame's stack; the interpreter reads the stack anew after a
        tracing function."""
        address = self.stack - place * _WORD
        former = _object(address)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        ctypes.c_size_t.from_address(address).value = id(value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(former))

    def variable(self, index: int) -> Any:
        """The cell or value of a variable, by its number in cell and free variable instructions."""
        if _VERSION == (3, 10):
            index += self.code.co_nlocals
        return _object(self.variables + index * _WORD)


def can_read(frame: FrameType) -> bool:
    """True if this interpreter lays out frames as this module expects."""
    if sys.implementation.name != "cpython" or not (3, 10) <= _VERSION <= (3, 13):
        return False
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    address = id(frame)
    if _VERSION == (3, 10):
        return _word(address + 4 * _WORD) == id(frame.f_code)
    inner = _word(address + 3 * _WORD)
    code, namespace = (4, 1) if _VERSION == (3, 11) else (0, 3)
    return _word(inner + code * _WORD) == id(frame.f_code) and _word(
        inner + namespace * _WORD
    ) == id(frame.f_globals)


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _integer(address: int) -> int:
    return ctypes.c_int.from_address(address).value


def _object(address: int) -> Any:
    try:
        return ctypes.py_object.from_address(address).value
    except ValueError:
        return NULL


def loaded_globals(code: CodeType) -> tuple[tuple[str, str | None], ...]:
    """The global names that a function reads, each with the attribute that it reads of it at once.

    Read from the bytes: `dis` describes every instruction in full, which takes ten times as long.
    """
    found: dict[tuple[str, str | None], None] = {}
    loaded: str | None = None
    for opcode, argument in _opcodes(code):
        if loaded is not None:
            attribute = opcode in _OF_ATTRIBUTES
            found[loaded, code.co_names[argument >> _ATTRIBUTE_FLAGS] if attribute else None] = None
        loaded = code.co_names[argument >> _GLOBAL_FLAGS] if opcode == _LOAD_GLOBAL else None
    return tuple(found)


def stored_globals(code: CodeType) -> set[str]:
    """The global names that a function assigns or deletes."""
    return {code.co_names[argument] for opcode, argument in _opcodes(code) if opcode in _SETTING}


def stored_cells(code: CodeType) -> set[str]:
    """The variables of enclosing functions that a function, or one nested in it, assigns or
    deletes."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _SETTING_CELLS}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return found.union(*map(stored_cells, inner))


def _opcodes(code: CodeType) -> Iterator[tuple[int, int]]:
    """The instructions of a function, each with its whole argument."""
    raw, extended = code.co_code, 0
    for opcode, argument in zip(raw[::2], raw[1::2], strict=True):
        if opcode == dis.EXTENDED_ARG:
            extended = (extended | argument) << 8
        elif opcode != _CACHE:
            yield opcode, extended | argument
            extended = 0


_SETTING_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_SETTING = frozenset(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_OF_ATTRIBUTES = frozenset(dis.opmap[n] for n in ("LOAD_ATTR", "LOAD_METHOD") if n in dis.opmap)
_CACHE = dis.opmap.get("CACHE", 0)
_GLOBAL_FLAGS = int(_VERSION >= (3, 11))
"""Bits of the argument of `LOAD_GLOBAL` that are no part of the number of a name."""
_ATTRIBUTE_FLAGS = int(_VERSION >= (3, 12))


@lru_cache(maxsize=4096)
def _variables(code: CodeType) -> int:
    """The number of variable slots before the stack in a frame."""
    if _VERSION == (3, 10):
        return code.co_nlocals + len(code.co_cellvars) + len(code.co_freevars)
    cells = set(code.co_cellvars) - set(code.co_varnames)
    return code.co_nlocals + len(cells) + len(code.co_freevars)


@lru_cache(maxsize=4096)
def _depths(code: CodeType) -> dict[int, int]:
    """The stack depth before each instruction, by its offset."""
    instructions = list(dis.get_instructions(code))
    following = {a.offset: b.offset for a, b in pairwise(instructions)}
    by_offset = {instruction.offset: instruction for instruction in instructions}
    handlers = _handlers(code)
    depths: dict[int, int] = {}
    pending = [(instructions[0].offset, 0), *handlers]
    while pending:
        offset, depth = pending.pop()
        if offset in depths:
            continue
        depths[offset] = depth
        instruction = by_offset[offset]
        pending += _next(instruction, depth, following)
    return depths


_LEAVING = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_JUMPING = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


def _next(
    instruction: dis.Instruction, depth: int, following: dict[int, int]
) -> list[tuple[int, int]]:
    """The offsets of the instructions that may follow, with their stack depth."""
    found = []
    argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    if instruction.opcode in _JUMPS:
        effect = dis.stack_effect(instruction.opcode, argument, jump=True)
        found.append((instruction.argval, depth + effect))
    if instruction.opname in _LEAVING or instruction.opname in _JUMPING:
        return found
    if instruction.offset in following:
        effect = dis.stack_effect(instruction.opcode, argument, jump=False)
        if instruction.opname == "RETURN_GENERATOR":
            effect = 1  # what the generator is resumed with; some versions say 0
        found.append((following[instruction.offset], depth + effect))
    return found


def _handlers(code: CodeType) -> list[tuple[int, int]]:
    """The offsets of exception handlers, with their stack depth."""
    parse: Any = getattr(dis, "_parse_exception_table", None)
    if parse is None:
        return []
    return [(e.target, e.depth + (2 if e.lasti else 1)) for e in parse(code)]
