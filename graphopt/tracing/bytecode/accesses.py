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


_INSTRUCTIONS = {
    "_global": "LOAD_GLOBAL",
    "_name": "LOAD_NAME",
    "_cell": "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF",
    "_set_global": "STORE_GLOBAL DELETE_GLOBAL",
    "_set_cell": "STORE_DEREF",
    "_attribute": "LOAD_ATTR LOAD_METHOD IMPORT_FROM",
    "_super": "LOAD_SUPER_ATTR",
    "_import": "IMPORT_NAME",
    "_set_attribute": "STORE_ATTR DELETE_ATTR",
    "_item": "BINARY_SUBSCR BINARY_SLICE",
    "_set_item": "STORE_SUBSCR STORE_SLICE",
    "_delete_item": "DELETE_SUBSCR",
    "_two": "BINARY_OP",
    "_compared": "COMPARE_OP",
    "_same_object": "IS_OP",
    "_contains": "CONTAINS_OP",
    "_goes_over": "GET_ITER",
    "_items": (
        "GET_YIELD_FROM_ITER UNPACK_SEQUENCE UNPACK_EX LIST_EXTEND SET_UPDATE"
        " DICT_UPDATE DICT_MERGE MATCH_SEQUENCE MATCH_MAPPING"
    ),
    "_yielded": "YIELD_VALUE",
    "_next": "FOR_ITER",
    "_formatted": "FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE",
    "_truth": "TO_BOOL UNARY_NOT GET_LEN",
    "_class_pattern": "MATCH_CLASS",
    "_call": "CALL CALL_KW CALL_FUNCTION CALL_METHOD CALL_FUNCTION_KW",
    "_prepare_call": "PRECALL",
    "_call_expanded": "CALL_FUNCTION_EX",
}
"""By the method of `instructions.Instructions`: the instructions that it follows."""

_HANDLERS = {name: handler for handler, names in _INSTRUCTIONS.items() for name in names.split()}
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
