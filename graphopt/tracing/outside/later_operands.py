"""Operands of instructions that stand for what is computed when the graph has run (`laters`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from graphopt.ir.source import SourceLine
from graphopt.tracing.comprehensions import computing, goes_through_all, is_comprehension, of_items
from graphopt.tracing.kept_items import as_piece
from graphopt.tracing.later import Later
from graphopt.tracing.later_values import is_later_text, letters
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.outside.callees import NAMED_CALLS, Instruction
from graphopt.tracing.outside.formats import Converted, formatting
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original

_SAYING_THEMSELVES = (str, int, float, torch.Tensor, *SYMBOLIC)
"""What gives a text that knows whether it stands for a value."""


class LaterOperands:
    """Lets instructions take what stands for such values."""

    _record: Record

    def _read_contents(
        self, frame: FrameType, value: Any, line: SourceLine, nested: bool = True
    ) -> None:
        """An instruction reads a container."""
        raise NotImplementedError

    def _keys(self, at: Instruction) -> None:
        """Keys of a new dictionary, or items of a set."""
        places: Sequence[int] = (2,) if at.step.instruction == "MAP_ADD" else (1,)
        if at.step.instruction == "BUILD_MAP":
            places = range(2, 2 * at.step.argument + 1, 2)
        elif at.step.instruction == "BUILD_SET":
            places = range(1, at.step.argument + 1)
        for place in places:
            self._exact(at, place, at.top(place))

    def _formatted(self, at: Instruction) -> None:
        both = at.step.instruction == "FORMAT_VALUE" and at.step.argument & 4
        place = 2 if both or at.step.instruction == "FORMAT_WITH_SPEC" else 1
        if place == 2:
            self._known(at, 1)
        value = at.top(place)
        if type(value) is str:
            at.put(place, as_piece(value))
        elif not self._stands_later(at, place):
            self._read_contents(at.frame, value, at.line)
            if both and at.step.argument & 3 and not isinstance(value, _SAYING_THEMSELVES):
                at.put(place, Converted(value))

    def _stands_later(self, at: Instruction, place: int, texts: bool = False) -> bool:
        """Whether something stands from now on for what an instruction takes."""
        return at.takes(place, self._record.laters.operand(at.top(place), at.line, texts))

    def _computes_of_all(self, at: Instruction) -> bool:
        """Whether a comprehension begins that each call computes for itself, of all items."""
        function, value = at.top(2), at.top(1)
        if not is_comprehension(function) or type(value) not in (Later, list, deque):
            return False
        if function.__code__.co_name == "<genexpr>" and not (
            at.step.consumed and goes_through_all((at.top(3), at.top(4)))
        ):
            return False  # it goes on later
        record, names = self._record, function.__globals__
        if type(value) is Later:
            rows = not value.is_number  # of which items are numbers as well
        else:
            rows = any(type(each) in (list, tuple, dict) for each in value)
        found = computing(function, record.is_outside, rows)
        items = None if found is None else record.laters.all_items(value, at.line)
        if found is None or items is None:
            return False
        for name in found.named:
            record.read(OutsidePlace("has", names, name), f"{name} in globals", at.line)
        at.put(2, of_items(found, items))
        at.put(1, ())  # of which it takes nothing now
        return True

    def _exact(self, at: Instruction, place: int, key: Any) -> Any:
        """A key, a text in which there are numbers that are known before a call as it is."""
        exact = self._record.laters.key(key) if isinstance(key, str) else key
        if exact is not key:
            at.put(place, exact)
        return exact

    def _known(self, at: Instruction, place: int) -> None:
        """Let an instruction find a text that the program changes between calls as it is now."""
        value = at.top(place)
        known = self._record.laters.known(value) if isinstance(value, str) else value
        if known is not value:
            at.put(place, known)

    def _known_beside(self, at: Instruction, place: int, other: int) -> None:
        """The same where the other operand is no text, whose own code may look at it."""
        if isinstance(at.top(place), str) and not isinstance(at.top(other), (str, int, Later)):
            self._known(at, place)

    def _taken(self, callee: Any, args: list[Any], at: Instruction) -> list[Any]:
        """Let a call take what stands for values that are not known in this trace."""
        taken = list(self._record.laters.taken(callee, args))
        top = int(at.step.instruction in NAMED_CALLS)
        for index, value in enumerate(taken):
            if value is not args[index]:
                at.put(top + len(args) - index, value)
        return taken

    def _spread(self, at: Instruction) -> None:
        """Let `function(*text)` take the letters of a text."""
        place = 1 + (at.step.argument & 1)
        if is_later_text(at.top(place)):
            at.put(place, tuple(letters(at.top(place))))

    def _instead(
        self, callee: Any, args: Sequence[Any], at: Instruction
    ) -> Callable[..., Any] | None:
        """What is called in place of a function that reads places by their names in a text, or that
        each call of the step has to call itself."""
        other: Callable[..., Any] | None = None
        if at.step.discarded:
            other = self._record.whole_calls.instead((at.code, at.step.offset), callee, args)
        other = other or formatting(callee, args, at.line)
        files, discarded = self._record.files, at.step.discarded
        other = other or files.called(original(callee), args, at.line, discarded)
        return other or self._record.laters.called(callee, args, at.line, at.step.discarded)


class Gives:
    """Gives a value to an instruction that takes an item, or a part, out of it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value
