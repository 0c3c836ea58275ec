"""Which functions are observed, which of their instructions may read or write outside the step, and
which method of `instructions.Instructions` follows each. Names of instructions are those of Python
3.10 to 3.13.
"""

from __future__ import annotations

import dis
import types
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from graphopt.ir.user_frames import is_library_file


class OutsideAccess(NamedTuple):
    """A bytecode instruction that may read or write state outside the step.

    Attributes:
        discarded: it is a call whose result nothing uses.
        looped: it is a call whose result the function goes through.
    """

    handler: str
    instruction: str
    name: Any
    argument: int
    offset: int
    discarded: bool
    looped: bool


@lru_cache(maxsize=4096)
def steps_of(code: CodeType) -> dict[int, OutsideAccess]:
    """Maps bytecode offsets of a function to its instructions that may access outside state."""
    instructions = list(dis.get_instructions(code))
    visible = [i for i in instructions if i.opname != "CACHE"]
    discarded = {a.offset for a, b in pairwise(visible) if b.opname == "POP_TOP"}
    looped = {a.offset for a, b in pairwise(visible) if b.opname == "GET_ITER"}
    return {
        i.offset: OutsideAccess(
            "_in_place" if _is_in_place(i) else _HANDLERS[i.opname],
            i.opname,
            _name(i),
            i.arg or 0,
            i.offset,
            i.offset in discarded,
            i.offset in looped,
        )
        for i in instructions
        if i.opname in _HANDLERS
    }


def _name(instruction: dis.Instruction) -> Any:
    """The variable, attribute or operator that an instruction names."""
    if instruction.opname.startswith("INPLACE_"):
        return _OPERATORS.get(instruction.opname)
    return instruction.argrepr if instruction.opname == "BINARY_OP" else instruction.argval


_OPERATORS = {"INPLACE_ADD": "+=", "INPLACE_OR": "|=", "INPLACE_SUBTRACT": "-="}


def _is_in_place(instruction: dis.Instruction) -> bool:
    name = instruction.opname
    return name.startswith("INPLACE_") or (
        name == "BINARY_OP" and instruction.argrepr.endswith("=")
    )


_HANDLERS = {
    "LOAD_GLOBAL": "_global",
    "LOAD_NAME": "_name",
    "LOAD_DEREF": "_cell",
    "LOAD_CLASSDEREF": "_cell",
    "LOAD_FROM_DICT_OR_DEREF": "_cell",
    "STORE_GLOBAL": "_set_global",
    "DELETE_GLOBAL": "_set_global",
    "STORE_DEREF": "_set_cell",
    "LOAD_ATTR": "_attribute",
    "LOAD_METHOD": "_attribute",
    "LOAD_SUPER_ATTR": "_super",
    "IMPORT_FROM": "_attribute",
    "IMPORT_NAME": "_import",
    "STORE_ATTR": "_set_attribute",
    "DELETE_ATTR": "_set_attribute",
    "BINARY_SUBSCR": "_item",
    "STORE_SUBSCR": "_set_item",
    "DELETE_SUBSCR": "_delete_item",
    "BINARY_SLICE": "_item",
    "STORE_SLICE": "_set_item",
    "BINARY_OP": "_two",
    "COMPARE_OP": "_compared",
    "IS_OP": "_same_object",
    "CONTAINS_OP": "_contains",
    "GET_ITER": "_goes_over",
    "GET_YIELD_FROM_ITER": "_items",
    "YIELD_VALUE": "_yielded",
    "FOR_ITER": "_next",
    "UNPACK_SEQUENCE": "_items",
    "UNPACK_EX": "_items",
    "LIST_EXTEND": "_items",
    "SET_UPDATE": "_items",
    "DICT_UPDATE": "_items",
    "DICT_MERGE": "_items",
    "FORMAT_VALUE": "_formatted",
    "FORMAT_SIMPLE": "_formatted",
    "FORMAT_WITH_SPEC": "_formatted",
    "CONVERT_VALUE": "_formatted",
    "TO_BOOL": "_truth",
    "UNARY_NOT": "_truth",
    "GET_LEN": "_truth",
    "MATCH_SEQUENCE": "_items",
    "MATCH_MAPPING": "_items",
    "MATCH_CLASS": "_class_pattern",
    "CALL": "_call",
    "PRECALL": "_prepare_call",
    "CALL_KW": "_call",
    "CALL_FUNCTION": "_call",
    "CALL_METHOD": "_call",
    "CALL_FUNCTION_KW": "_call",
    "CALL_FUNCTION_EX": "_call_expanded",
}
_HANDLERS.update(
    (name, "_truth")
    for name in dis.opmap
    if name.startswith(("POP_JUMP", "JUMP_IF")) and "NONE" not in name
)
_HANDLERS.update(
    (name, "_two")
    for name in dis.opmap
    if name.startswith(("BINARY_", "INPLACE_")) and name not in _HANDLERS
)


_READ_THROUGH = frozenset(
    {"os", "dataclasses", "copy", "collections", "enum", "types", "functools", "configparser",
     "argparse", "string", "_collections_abc", "graphlib", "reprlib", "queue", "weakref",
     "_weakrefset", "csv"}
)  # fmt: skip
"""Modules of the standard library whose functions read what they are given."""

_INTERNAL = frozenset({"sympy", "mpmath", "numpy", "triton", "networkx"})
"""Libraries that torch uses while it traces."""

_OF_TORCH = ("torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py", "torch/amp/grad_scaler.py")


@lru_cache(maxsize=4096)
def is_observed(filename: str) -> bool:
    """True if the instructions of a file's functions are observed."""
    if not is_library_file(filename):
        return not _INTERNAL.intersection(Path(filename).parts)
    name = filename.replace("\\", "/")
    if name.endswith(_OF_TORCH) or "/torch/distributions/" in name:
        return True
    path = Path(filename)
    name = path.parent.name if path.stem == "__init__" else path.stem
    if filename.startswith("<frozen "):
        name = filename.removeprefix("<frozen ").removesuffix(">")
    return name in _READ_THROUGH and not {"torch", "graphopt"} & set(path.parts)


def is_generated(code: types.CodeType) -> bool:
    """True for generated code such as a named tuple's constructor: it reads only its arguments."""
    return code.co_filename == "<string>" and "_tuple_new" in code.co_names
