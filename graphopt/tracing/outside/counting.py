"""Loads of a value that only goes into a store to where it came from: `self.n += 1`."""

from __future__ import annotations

import dis
from collections.abc import Sequence

_STORES = {
    "LOAD_ATTR": "STORE_ATTR",
    "LOAD_METHOD": "STORE_ATTR",
    "LOAD_GLOBAL": "STORE_GLOBAL",
    "LOAD_DEREF": "STORE_DEREF",
    "BINARY_SUBSCR": "STORE_SUBSCR",
}
_PURE = frozenset(
    {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_LOAD_FAST", "CACHE",
     "NOP", "EXTENDED_ARG"}
)  # fmt: skip
_MOVING = frozenset({"SWAP", "ROT_TWO", "ROT_THREE", "ROT_FOUR"})
_COMPUTING = ("BINARY_", "INPLACE_")


def counting_pairs(instructions: Sequence[dis.Instruction]) -> tuple[set[int], set[int]]:
    """Offsets of such loads, and of the stores.

    Between the two are only loads and arithmetic, so that nothing else sees the value.
    """
    loads: set[int] = set()
    stores: set[int] = set()
    for index, instruction in enumerate(instructions):
        wanted = _STORES.get(instruction.opname)
        if wanted is None:
            continue
        store = _store(instructions[index + 1 :], wanted)
        if store is not None and (wanted == "STORE_SUBSCR" or store.argval == instruction.argval):
            loads.add(instruction.offset)
            stores.add(store.offset)
    return loads, stores


def _store(following: Sequence[dis.Instruction], wanted: str) -> dis.Instruction | None:
    height = 1  # of the stack, with the loaded value at its bottom
    computed = False
    for instruction in following:
        name = instruction.opname
        if instruction.is_jump_target:
            return None
        if name == wanted:
            return instruction if computed else None
        if name == "BINARY_SUBSCR" or (name in _MOVING and not computed):
            return None
        if name.startswith(_COMPUTING):
            height = max(height - 1, 1)
            computed = computed or height == 1
        elif name in _PURE:
            argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
            height += dis.stack_effect(instruction.opcode, argument)
        elif name not in _MOVING and not (name == "LOAD_ATTR" and height > 1):
            return None
    return None
