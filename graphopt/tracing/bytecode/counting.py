"""Bytecode pattern of read-modify-write: a load whose value is only stored back to its place, as in
`self.n += 1`."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from typing import Any

from graphopt.ir.source import SourceLine
from graphopt.tracing.outside.places import OutsidePlace

_STORES = {
    "LOAD_ATTR": "STORE_ATTR",
    "LOAD_METHOD": "STORE_ATTR",
    "LOAD_GLOBAL": "STORE_GLOBAL",
    "LOAD_DEREF": "STORE_DEREF",
    "BINARY_SUBSCR": "STORE_SUBSCR",
    "BINARY_SLICE": "STORE_SLICE",
}
_HEIGHTS = {"STORE_ATTR": 2, "STORE_SUBSCR": 3, "STORE_SLICE": 4}
"""Of the stack where such a store begins, with the stored value at its bottom."""
_MOVING = frozenset({"SWAP", "ROT_TWO", "ROT_THREE", "ROT_FOUR"})
_COMPUTING = ("BINARY_", "INPLACE_")
_NOTHING = frozenset({"CACHE", "NOP", "EXTENDED_ARG"})
_ON_TOP = ("LOAD_", "CALL", "PRECALL", "KW_NAMES", "PUSH_NULL", "BUILD_", "UNARY_", "COMPARE_OP",
           "CONTAINS_OP", "IS_OP", "LIST_EXTEND", "TO_BOOL", *_NOTHING)  # fmt: skip
"""Instructions that take their operands from the top of the stack, and put at most two there."""


def counting_pairs(instructions: Sequence[dis.Instruction]) -> dict[int, int]:
    """Maps the offset of each load in a read-modify-write to that of its store.

    What is between the two takes other values than this one, but for the arithmetic. Whether they
    are of one object is not known before they are executed.
    """
    pairs: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        wanted = _STORES.get(instruction.opname)
        if wanted is None:
            continue
        store = _store(instructions[index + 1 :], wanted)
        of_item = wanted in ("STORE_SUBSCR", "STORE_SLICE")
        if store is not None and (of_item or store.argval == instruction.argval):
            pairs[instruction.offset] = store.offset
    return pairs


def _store(following: Sequence[dis.Instruction], wanted: str) -> dis.Instruction | None:
    height = 1  # of the stack, with the loaded value at its bottom
    computed = slicing = moved = False
    for instruction in following:
        name = instruction.opname
        if instruction.is_jump_target:
            return None
        if name == wanted:
            stored = moved or height == _HEIGHTS.get(name, 1)
            return instruction if computed and stored else None
        if name in _MOVING:  # below an object that is on the stack already, as of `+=`
            if not computed or height != 1:
                return None
            moved = True
        elif moved:
            if name not in _NOTHING:
                return None
        elif name.startswith(_COMPUTING):
            if height == 2 and name == "BINARY_SUBSCR" and not slicing:
                return None
            height = max(height + _effect(instruction), 1)
            computed = computed or height == 1
        elif not name.startswith(_ON_TOP):
            return None
        else:
            effect = _effect(instruction)
            if height - (_pushed(name) - effect) < 1:
                return None
            height += effect
        slicing = name == "BUILD_SLICE" or (slicing and name == "CACHE")
    return None


def _effect(instruction: dis.Instruction) -> int:
    argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    return dis.stack_effect(instruction.opcode, argument)


def _pushed(name: str) -> int:
    """The least number of results that an instruction pushes on the stack."""
    if name in _NOTHING or name in ("KW_NAMES", "PRECALL", "LIST_EXTEND"):
        return 0
    return 2 if name == "LOAD_METHOD" else 1


Load = tuple[OutsidePlace, str, SourceLine]
"""A place whose value the step loads, how the program gets there, and the line."""
Store = tuple[int, int]
"""A frame, by its id, and the offset of an instruction in it."""


class PendingLoads:
    """The loads whose values only go into a store that has not run yet."""

    def __init__(self) -> None:
        self._loads: dict[Store, list[Load]] = {}

    def add(self, store: Store, load: Load) -> None:
        self._loads.setdefault(store, []).append(load)

    def places(self, frame: int) -> list[OutsidePlace]:
        """The places of a frame's pending loads."""
        waiting = [loads for store, loads in self._loads.items() if store[0] == frame]
        return [place for loads in waiting for place, _, _ in loads]

    def take(self, store: Store) -> list[Load]:
        """Removes and returns the loads of a store that runs next."""
        return self._loads.pop(store, [])

    def take_of(self, identity: tuple[Any, ...]) -> list[Load]:
        """Removes and returns the pending loads from one place."""
        taken = []
        for store, loads in self._loads.items():
            taken += [load for load in loads if load[0].identity == identity]
            self._loads[store] = [load for load in loads if load[0].identity != identity]
        return taken

    def take_all(self) -> list[Load]:
        """Removes and returns loads that never reached their store, as after an exception."""
        taken = [load for loads in self._loads.values() for load in loads]
        self._loads.clear()
        return taken
