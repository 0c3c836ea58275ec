"""Tensors and numbers that a traced step obtained from torch, and those that are still held
after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any

import torch

from graphopt._compat.own_tracing import untraced, without_overrides
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line
from graphopt.runtime.memory import frozen_objects_seen
from graphopt.tracing.effects.decisions import Decider
from graphopt.tracing.functional.tagging import Tagger
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.impurity import taken_for_a_number
from graphopt.tracing.scalars.positions import Positions


class ObtainedValues:
    """Weak references to the tensors that a traced step got from torch, and to the numbers that it
    read from them, with source lines.

    Args:
        tagger: knows in which phase the step is.
        arguments: which of the numbers that the graph takes are arguments of the step.

    Attributes:
        decider: answers decisions by values; not there before the step runs.
        positions: known numbers as positions; not there before the step runs.
        refused: an error that the step may have swallowed.
    """

    def __init__(self, tagger: Tagger, arguments: Collection[int]) -> None:
        self._tagger, self._arguments = tagger, set(arguments)
        self.decider: Decider
        self.positions: Positions
        self._references: list[tuple[weakref.ref[torch.Tensor], SourceLine | None]] = []
        self._numbers: list[tuple[weakref.ref[Any], SourceLine | None]] = []
        self.refused: CaptureError | None = None

    def refuse(self, error: CaptureError) -> CaptureError:
        """Records and returns an error that refuses the step, even if the step catches it."""
        self.refused = self.refused or error
        return error

    def add_number(self, number: Any) -> None:
        """Records a number that the program obtained, with its source line."""
        self._numbers.append((weakref.ref(number), current_user_line()))

    def hand_out(self, numbers: Iterable[int], text: bool) -> None:
        """Records that the step takes a number itself. Optimizer settings that a scheduler changes
        are for the optimizer alone.

        Args:
            numbers: the inputs of the graph that it was computed from.
            text: true if the number becomes text.
        """
        if all(number in self._arguments for number in numbers):
            return
        if text:
            raise HostWork.TEXT.refused("a setting or a count of an optimizer")
        if self._tagger.phase != "optimizer":
            raise self.refuse(taken_for_a_number())

    def decide(self, number: Any, kind: type) -> Any:
        """The value of a number in this call, on which the graph then assumes an outcome."""
        with without_overrides():  # what it is computed from is looked at, not used
            return untraced(self.decider.decide, number, kind)

    def text(self, function: Callable[..., str], args: tuple[Any, ...]) -> str:
        """The text of a graph value in this call, for an error that the step may raise next.
        Without one the step is refused."""
        what = "a tensor" if isinstance(args[0], torch.Tensor) else "a number of a tensor's"
        error = HostWork.TEXT.refused(what)
        if not self.decider.may_know:
            raise error
        return untraced(self.decider.text, function, args)

    def array(self, what: str) -> CaptureError:
        """The error that refuses a numpy array of values of the graph."""
        return HostWork.ARRAY.refused(what)

    def kept_number(self, known: set[int]) -> tuple[SourceLine | None] | None:
        """The source line of the first obtained number that something still holds, except
        `known`, or None."""
        numbers = self._numbers
        lines = _after_collections(
            lambda: [line for each, line in numbers if _is_alive(each(), known)]
        )
        return (lines[0],) if lines else None

    def line_of(self, value: object) -> SourceLine | None:
        """The source line at which the step got a tensor or number."""
        known = [*self._references, *self._numbers]
        return next((line for reference, line in known if reference() is value), None)

    def add(self, result: Any) -> None:
        """Records the tensors in a nested value that the program obtained, with the source line."""
        if isinstance(result, torch.Tensor):
            self._references.append((weakref.ref(result), current_user_line()))
        elif isinstance(result, (list, tuple)):
            for item in result:
                self.add(item)

    def kept(self, known: set[int]) -> tuple[list[int], SourceLine | None] | None:
        """Shape and source line of the first obtained tensor that a Python object still holds.
        Those in `known` (by id), and those that only autograd holds (in C++), do not count."""
        references = self._references
        tensors: list[Any] = _after_collections(
            lambda: [t for t in (each() for each, _ in references) if _is_alive(t, known)]
        )
        if not tensors:
            return None
        with frozen_objects_seen():
            return self._first_held(tensors)

    def _first_held(
        self, tensors: list[torch.Tensor]
    ) -> tuple[list[int], SourceLine | None] | None:
        if not _holders(tensors):
            return None
        for reference, line in self._references:
            one = [tensor for tensor in tensors if tensor is reference()]
            held = any(holder is not tensors for holder in _holders(one)) if one else False
            if held:
                return list(one[0].shape), line
        return None


def _after_collections(find: Callable[[], list[Any]]) -> list[Any]:
    """What is still found when garbage has gone: that of the trace is young."""
    found = find()
    for generation in (1, 2):
        if found:
            gc.collect(generation)
            found = find()
    return found


def _is_alive(value: Any, known: set[int]) -> bool:
    return value is not None and id(value) not in known


def _holders(tensors: list[torch.Tensor]) -> list[object]:
    """The Python objects that refer to one of the tensors, except these and frames."""
    asked = tuple(tensors)  # from Python 3.13 on, what is asked about is found as well
    return [
        holder
        for holder in gc.get_referrers(*asked)
        if holder is not tensors and holder is not asked and not isinstance(holder, FrameType)
    ]
