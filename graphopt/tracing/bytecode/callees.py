"""Operands of call instructions: positions of callee and arguments on CPython's value stack.

From below, `CALL` of three arguments finds

                         function                method
    3.10 CALL_FUNCTION   callee, a, b, c
    3.10 CALL_METHOD     NULL, callee, a, b, c   callee, object, a, b, c
    3.11, 3.12           NULL, callee, a, b, c   callee, object, a, b, c
    3.13                 callee, NULL, a, b, c   callee, object, a, b, c

with the names of keyword arguments on top where there are any.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from graphopt._compat.frames import NULL, Operands
from graphopt.ir.source import SourceLine
from graphopt.tracing.bytecode.accesses import OutsideAccess

NAMED_CALLS = ("CALL_KW", "CALL_FUNCTION_KW")
"""Calls with names of keywords above all else."""
_OF_SLICES = frozenset({"BINARY_SLICE", "STORE_SLICE"})
_PLAIN = ("CALL_FUNCTION", "CALL_FUNCTION_KW")
"""Calls that are never of a method."""


def instruction_of(frame: FrameType, step: OutsideAccess) -> Instruction:
    """The instruction that a frame executes next, with its operands."""
    kind = _OfSlice if step.instruction in _OF_SLICES else Instruction
    return kind(frame, step)


class Instruction(Operands):
    """The instruction that a frame executes next, with its operands.

    Attributes:
        frame, line: where it stands.
        step: what it does.
    """

    __slots__ = ("frame", "line", "step")

    def __init__(self, frame: FrameType, step: OutsideAccess) -> None:
        super().__init__(frame, step.offset)
        self.frame, self.step = frame, step
        self.line = SourceLine.of(frame)

    def takes(self, place: int, other: Any) -> None:
        """Replaces an operand on the stack unless `other` is None."""
        if other is not None:
            self.put(place, other)

    def place_of_callee(self) -> int:
        """The stack position of the callee."""
        step = self.step
        top = step.argument + int(step.instruction in NAMED_CALLS)
        if step.instruction in _PLAIN:
            return top + 1
        if sys.version_info >= (3, 13):
            return top + 2
        return top + 1 if self.top(top + 2) is NULL else top + 2

    def called_with(self) -> tuple[Any, list[Any]]:
        """The callee and its arguments, the bound object of a method first."""
        count, instruction = self.step.argument, self.step.instruction
        top = int(instruction in NAMED_CALLS)
        args = [self.top(top + place) for place in range(count, 0, -1)]
        first, second = self.top(top + count + 1), NULL
        if instruction not in _PLAIN:
            second = self.top(top + count + 2)
        if sys.version_info >= (3, 13):
            return second, (args if first is NULL else [first, *args])
        return (first, args) if second is NULL else (second, [first, *args])

    def expanded_call(self) -> tuple[int, Any, list[Any]]:
        """The stack position of the callee in `function(*args, **keywords)`, `args`, and the values
        of `keywords`."""
        keywords = self.step.argument & 1
        place = 2 + keywords + int(sys.version_info >= (3, 13))
        return place, self.top(1 + keywords), list(self.top(1).values()) if keywords else []


class _OfSlice(Instruction):
    """`x[a:b]` and `x[a:b] = y` from Python 3.12 on, presented with one slice on the stack as in
    earlier versions."""

    __slots__ = ()

    def top(self, place: int) -> Any:
        if place == 1:
            return slice(super().top(2), super().top(1))
        return super().top(place + 1)

    def put(self, place: int, value: Any) -> None:
        if place > 1:
            super().put(place + 1, value)
        elif isinstance(value, slice):  # any other stands for a key that nothing uses
            super().put(2, value.start)
            super().put(1, value.stop)
