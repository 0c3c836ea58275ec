"""Operands of instructions that stand for what is computed when the graph has run (`laters`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from graphopt._compat.frames import Operands
from graphopt.ir.source import SourceLine
from graphopt.tracing.later import is_later_text, letters
from graphopt.tracing.outside.accesses import OutsideAccess
from graphopt.tracing.outside.callees import NAMED_CALLS
from graphopt.tracing.outside.record import Record


class LaterOperands:
    """Lets instructions take what stands for such values."""

    _record: Record

    def _read_contents(
        self, frame: FrameType, value: Any, line: SourceLine, nested: bool = True
    ) -> None:
        """An instruction reads a container."""
        raise NotImplementedError

    def _keys(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        """Keys of a new dictionary, or items of a set."""
        places: Sequence[int] = (2,) if step.instruction == "MAP_ADD" else (1,)
        if step.instruction == "BUILD_MAP":
            places = range(2, 2 * step.argument + 1, 2)
        elif step.instruction == "BUILD_SET":
            places = range(1, step.argument + 1)
        for place in places:
            self._exact(operands, place, operands.top(place))

    def _formatted(
        self, frame: FrameType, step: OutsideAccess, operands: Operands, line: SourceLine
    ) -> None:
        with_spec = step.instruction == "FORMAT_VALUE" and step.argument & 4
        place = 2 if with_spec or step.instruction == "FORMAT_WITH_SPEC" else 1
        laters, value = self._record.laters, operands.top(place)
        text = None if laters is None or type(value) is not str else laters.piece(value)
        if text is not None:
            operands.put(place, text)
        elif not self._stands_later(operands, place, line):
            self._read_contents(frame, value, line)

    def _stands_later(
        self, operands: Operands, place: int, line: SourceLine, texts: bool = False
    ) -> bool:
        """Whether something stands from now on for what an instruction takes."""
        laters, value = self._record.laters, operands.top(place)
        other = None if laters is None else laters.operand(value, line, texts)
        if other is not None:
            operands.put(place, other)
        return other is not None

    def _exact(self, operands: Operands, place: int, key: Any) -> Any:
        """A key, a text in which there are numbers that are known before a call as it is."""
        laters = self._record.laters
        if laters is None or not isinstance(key, str):
            return key
        exact = laters.key(key)
        if exact is not key:
            operands.put(place, exact)
        return exact

    def _taken(
        self, callee: Any, args: list[Any], step: OutsideAccess, operands: Operands
    ) -> list[Any]:
        """Let a call take what stands for values that are not known in this trace."""
        laters = self._record.laters
        taken = args if laters is None else list(laters.taken(callee, args))
        top = int(step.instruction in NAMED_CALLS)
        for index, value in enumerate(taken):
            if value is not args[index]:
                operands.put(top + len(args) - index, value)
        return taken

    def _spread(self, step: OutsideAccess, operands: Operands) -> None:
        """Let `function(*text)` take the letters of a text."""
        place = 1 + (step.argument & 1)
        if self._record.laters is not None and is_later_text(operands.top(place)):
            operands.put(place, tuple(letters(operands.top(place))))

    def _done_later(
        self, callee: Any, args: Sequence[Any], line: SourceLine, discarded: bool
    ) -> Callable[..., Any] | None:
        """What is called in place of a function that each call of the step has to call itself."""
        laters = self._record.laters
        return None if laters is None else laters.called(callee, args, line, discarded)


class Gives:
    """Gives a value to an instruction that takes an item, or a part, out of it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value
