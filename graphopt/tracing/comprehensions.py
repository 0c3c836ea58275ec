"""Comprehensions over what is known only when the graph has run: each call computes them then.

    history.append((loss.item(), step))
    np.median([pair[0] for pair in history[-20:]])

Followed item by item, such a line would need a graph for each length of the list. Where all that
a comprehension does with the items is to compute, it is called by itself instead, as a function of
all of them.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from graphopt.tracing.later import Later
from graphopt.tracing.later_values import is_later
from graphopt.tracing.replace import original

_LISTED = {"<listcomp>": None, "<setcomp>": None, "<dictcomp>": None, "<genexpr>": list}
"""By the name of its code, what is made of what a comprehension gives."""
_GOING_THROUGH_ALL: tuple[Any, ...] = (
    all, any, dict, frozenset, list, max, min, set, sorted, str.join, sum, tuple
)  # fmt: skip
"""Functions that go through a generator, all of it or as far as matters, before they return."""
_FUNCTIONS = frozenset(
    {"abs", "bool", "dict", "float", "int", "isinstance", "len", "list", "max", "min", "repr"}
    | {"round", "sorted", "str", "sum", "tuple"}
)
"""Functions of Python's that compute, and do nothing else."""
_METHODS = frozenset({"get", "items", "keys", "values"})
"""Methods of rows and dictionaries."""
_COMPUTING = frozenset(
    {"BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_STRING", "BUILD_TUPLE"}
    | {"CACHE", "CALL", "CALL_FUNCTION", "CALL_INTRINSIC_1", "CALL_METHOD", "COMPARE_OP"}
    | {"CONTAINS_OP", "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "DUP_TOP", "END_FOR"}
    | {"EXTENDED_ARG", "FORMAT_SIMPLE", "FORMAT_VALUE", "FORMAT_WITH_SPEC", "FOR_ITER"}
    | {"GEN_START", "IS_OP", "LIST_APPEND", "LOAD_CONST", "LOAD_DEREF", "MAP_ADD", "NOP"}
    | {"POP_ITER", "POP_TOP", "PRECALL", "PUSH_NULL", "RERAISE", "RESUME", "RETURN_CONST"}
    | {"RETURN_GENERATOR", "RETURN_VALUE", "ROT_TWO", "ROT_THREE", "SET_ADD", "SWAP", "TO_BOOL"}
    | {"UNPACK_SEQUENCE", "YIELD_VALUE"}
)
_BEGINNINGS = ("BINARY_", "JUMP_", "LOAD_FAST", "POP_JUMP_", "STORE_FAST", "UNARY_")
_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})


class Comprehension:
    """A comprehension as a function of its items.

    Args:
        code: of the comprehension.
        closed: values of the variables of the function around it.

    Attributes:
        named: functions of Python's that it calls.

    >>> function = lambda rows: [row * 2 for row in rows]
    >>> code = next(c for c in function.__code__.co_consts if hasattr(c, "co_code"))
    >>> Comprehension(code, ())([1, 2])
    [2, 4]
    """

    def __init__(self, code: CodeType, closed: tuple[Any, ...]) -> None:
        self._code, self._closed = code, closed
        self.named = _computing(code) or frozenset()
        cells = tuple(map(CellType, closed))
        self._compute = FunctionType(code, {"__builtins__": builtins}, closure=cells or None)
        self._listed: Any = _LISTED[code.co_name]
        self.__name__ = code.co_name

    def __call__(self, items: Any) -> Any:
        found = self._compute(iter(items))
        return found if self._listed is None else self._listed(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Comprehension) or self._code is not other._code:
            return False
        return repr(self._closed) == repr(other._closed)  # a number that is none is itself

    def __hash__(self) -> int:
        return hash(self._code)


def is_comprehension(function: Any) -> bool:
    """Whether a function is the code of a comprehension."""
    return type(function) is FunctionType and function.__code__.co_name in _LISTED


def goes_through_all(callees: Sequence[Any]) -> bool:
    """Whether a function goes through a generator before anything else happens.

    Args:
        callees: it, and what else may lie where it does on the interpreter's stack.
    """
    return any(original(each) in _GOING_THROUGH_ALL for each in callees if callable(each))


def computing(
    function: FunctionType, is_outside: Callable[[CellType], bool], rows: bool
) -> Comprehension | None:
    """A comprehension that is about to be called, as a function of its items; None where it does
    more than to compute.

    Args:
        function: what an instruction finds below what it goes over.
        is_outside: whether a variable is one of the program's and not of the step.
        rows: the items are containers, which it must not hand on.
    """
    named, cells = _computing(function.__code__), function.__closure__ or ()
    if named is None or any(name in function.__globals__ for name in named):
        return None
    if rows and not _takes_apart(function.__code__):
        return None
    if any(is_outside(cell) or not _is_filled(cell) for cell in cells):
        return None
    closed = tuple(cell.cell_contents for cell in cells)
    if not all(type(value) in _PLAIN and not is_later(value) for value in closed):
        return None
    return Comprehension(function.__code__, closed)


def of_items(function: Comprehension, items: Later) -> Callable[[Any], Any]:
    """What is called in its place."""
    return lambda given: Later(function, (items,))


@lru_cache(maxsize=1024)
def _computing(code: CodeType) -> frozenset[str] | None:
    """The functions of Python's that a comprehension calls; None where it does more than to
    compute."""
    named = set()
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            allowed = each.argval in _METHODS
        elif each.opname == "LOAD_GLOBAL":
            allowed = each.argval in _FUNCTIONS
            named.add(str(each.argval))
        elif each.opname == "BINARY_OP":
            allowed = not each.argrepr.endswith("=")
        else:
            allowed = each.opname in _COMPUTING or each.opname.startswith(_BEGINNINGS)
        if not allowed:
            return None
    return frozenset(named)


@lru_cache(maxsize=1024)
def _takes_apart(code: CodeType) -> bool:
    """Whether a comprehension does nothing with its items but to take something out of them."""
    found = [each for each in dis.get_instructions(code) if each.opname not in _IN_BETWEEN]
    for number, each in enumerate(found[:-1]):
        if each.opname == "FOR_ITER":
            stored = found[number + 1]
            if stored.opname == "UNPACK_SEQUENCE":
                return True
            return stored.opname == "STORE_FAST" and _takes_from(found, stored.argval)
    return False


def _takes_from(found: Sequence[dis.Instruction], name: str) -> bool:
    """Whether each use of a variable takes something out of it."""
    for number, each in enumerate(found):
        if each.opname.startswith("LOAD_FAST") and each.argval == name:
            behind = [each.opname for each in found[number + 1 : number + 3]]
            if behind[0] not in ("LOAD_ATTR", "LOAD_METHOD") and behind[1:] != ["BINARY_SUBSCR"]:
                return False
        elif each.opname.startswith("LOAD_FAST") and type(each.argval) is tuple:
            return False  # two variables at once
    return True


_IN_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - which raises where it is empty
    except ValueError:
        return False
    return True
