"""Values that a step takes from iterators outside it, as in `next(loader)`.

Each call takes them before its graph runs, once: whoever looks for the graph of the call, traces it
or runs it is given the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.errors import CaptureError
from graphopt.tracing.draws.generators import (
    global_generators,
    is_same_state,
    read_state,
    write_state,
)
from graphopt.tracing.outside.places import OutsidePlace, same

States = Sequence[tuple[Any, Any]]
"""Generators, each with its state."""
Reads = Sequence[tuple[OutsidePlace, Any, str]]
"""Places, with what was there and their paths."""


class Taking:
    """Asks an object that each call finds for something, which changes it: the first argument, or
    what is found.

    Args:
        function: `next` or `iter`.
        find: gives the object, of the arguments of a call; None: it is an argument of this.
        kind: the class of the object.
        path: how messages name it.
        ends: it is an iterator that has no further value.
        behind_draws: the step has drawn random numbers with torch before.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        find: Callable[[Sequence[Any]], Any] | None,
        kind: type,
        path: str,
        ends: bool = False,
        behind_draws: bool = False,
    ) -> None:
        self.function, self.find, self.kind, self.path = function, find, kind, path
        self.ends, self.behind_draws = ends, behind_draws

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Taking) and other._known() == self._known()

    def __hash__(self) -> int:
        return hash(self._known())

    def _known(self) -> tuple[Any, ...]:
        return self.function, self.find, self.kind, self.ends

    def asked(self, leaves: Sequence[Any], args: Sequence[Any]) -> Any:
        """The object that is asked in this call.

        Raises:
            NotTakenError: there is none of the class.
        """
        found = args[0] if self.find is None else self.find(leaves)
        if type(found) is not self.kind:
            raise NotTakenError(f"{self.path} became {found!r}")
        return found

    def __call__(self, taken: Taken) -> Any:
        """What is given, of what has been taken.

        Raises:
            NotTakenError: there is a further value, where there was none; or random numbers have
                been drawn in another order.
            Exception: what the object has raised.
        """
        if self.behind_draws and taken.draws_with_torch:
            raise NotTakenError(f"{self.path} draws random numbers with torch")
        if not (self.ends and isinstance(taken.error, StopIteration)):
            if taken.error is not None:
                raise taken.error
            if self.ends:
                raise NotTakenError(f"{self.path} has a further value")
        return taken.value


class PlaceOf:
    """Gives what is in a place; the arguments do not matter."""

    def __init__(self, place: OutsidePlace) -> None:
        self.place = place

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return self.place.now()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlaceOf) and other.place.identity == self.place.identity

    def __hash__(self) -> int:
        return hash(self.place.identity)


class NotTakenError(Exception):
    """The graph of a program does not hold for a call, which is to take nothing for it."""


@dataclass(frozen=True)
class Taken:
    """What an object has given when it was asked by a function, or raised, and where it has left
    generators that it has drawn from."""

    function: Callable[[Any], Any]
    asked: Any
    value: Any
    error: Exception | None
    left: list[tuple[Any, Any]]

    @property
    def draws_with_torch(self) -> bool:
        """Whether torch's generator was drawn from."""
        return any(isinstance(generator, torch.Generator) for generator, _ in self.left)


@dataclass
class TakenValues:
    """What one call has taken, in order.

    Attributes:
        may_take: iterators may be advanced now; else it is only given again what has been taken.
        refused: nothing is ever taken.
        captured_for: the program of the graph that has been captured for the call, whose traces
            have left the places of iterators as the call leaves them.
        ended: what an object has raised last in a trace, whether the step has done anything by then
            that others see, and where.
    """

    may_take: bool = False
    refused: bool = False
    captured_for: object = None
    ended: tuple[Exception, bool, str | None] | None = None
    _all: list[Taken] = field(default_factory=list)
    _given: int = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_at_end(self) -> bool:
        """Whether the next value is still to be taken."""
        return self._given == len(self._all)

    def begin_again(self) -> None:
        """The first value is the next one."""
        self._given, self.ended = 0, None

    def forget_raised(self) -> None:
        """Let go of what the step has caught, which knows its functions and what they hold."""
        if self.ended is not None:
            _let_go(self.ended[0])

    def raised(self, error: CaptureError | StopIteration) -> Exception:
        """What eager code raises where a trace was left by an error."""
        if self.ended is None or self.ended[0] not in (error, error.__cause__):
            return error
        ended, late, location = self.ended
        _let_go(ended)
        if not late:
            return ended
        return CaptureError(
            f"an iterator raises {ended!r} in the middle of it, when it has changed something",
            location=location,
            hint="take values from iterators first, or outside the step",
        )

    @contextmanager
    def taking(self) -> Iterator[None]:
        """While active, iterators may be advanced."""
        self.may_take = not self.refused
        try:
            yield
        finally:
            self.may_take = False

    def take(self, function: Callable[[Any], Any], asked: Any) -> None:
        """Take a value. The generators stay where that leaves them."""
        before = saved_states()
        value, error = None, None
        try:
            value = function(asked)
        except Exception as raised:
            error = raised
        pairs = zip(saved_states(), before, strict=True)
        left = [now for now, then in pairs if not is_same_state(now[1], then[1])]
        self._all.append(Taken(function, asked, value, error, left))

    def take_for_trace(self, function: Callable[[Any], Any], asked: Any, states: States) -> None:
        """The same where a trace asks for it, and has left generators in these states. They are as
        they were afterwards."""
        before = saved_states()
        for generator, state in (*self._left(), *states):
            write_state(generator, state)
        try:
            self.take(function, asked)
        finally:
            for generator, state in before:
                write_state(generator, state)

    def _left(self) -> list[tuple[Any, Any]]:
        """Where the values so far have left torch's generator, from which a trace draws nothing."""
        torch_s = torch.random.default_generator
        return [pair for each in self._all for pair in each.left if pair[0] is torch_s]

    def next(self, function: Callable[[Any], Any], asked: Any) -> Taken:
        """What is taken next.

        Raises:
            NotTakenError: it is to be taken still, or something else has been taken.
        """
        if self.is_at_end and not self.may_take:
            raise NotTakenError("a value is taken from an iterator")
        if self.is_at_end:
            self.take(function, asked)
        taken = self._all[self._given]
        if taken.asked is not asked or taken.function is not function:
            raise NotTakenError("values are taken from other iterators")
        self._given += 1
        return taken

    def again(self) -> Taken:
        """What the traces of the call have taken next, wherever that came from."""
        self._given += 1
        return self._all[self._given - 1]

    def check_used(self, used: int) -> None:
        """See that a graph uses all.

        Args:
            used: how many it uses.

        Raises:
            CaptureError: it does not.
        """
        if used != len(self._all):
            raise CaptureError(
                f"it has taken {len(self._all)} values from iterators, and where it decides as it"
                f" does for the values of this call it takes {used}",
                hint="take values before it decides by the value of a tensor; or outside the step,"
                " and pass them as arguments",
            )


class NeedsValueError(CaptureError):
    """A trace has come to where the step takes a value that its call has not taken yet.

    Attributes:
        function, asked: what gives it.
        states: where the trace has left the generators of Python and numpy.
        reads: places that the step has read by then, with what was there and their paths.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        asked: Any,
        states: States,
        path: str,
        location: str | None,
        reads: Reads,
    ) -> None:
        super().__init__(f"it takes a value from {path}", location=location)
        self.function, self.asked, self.states = function, asked, states
        self.path, self.reads = path, reads

    def take(self, taken: TakenValues) -> None:
        """Take the value.

        Raises:
            CaptureError: that changes what the step has read before.
        """
        before = [read for read in self.reads if same(read[0].now(), read[1])]
        taken.take_for_trace(self.function, self.asked, self.states)
        for place, value, path in before:
            if not same(place.now(), value):
                raise CaptureError(
                    f"it reads {path}, which {self.path}, an iterator from which it takes a value"
                    " then, changes",
                    location=self.location,
                    hint="take the value outside the step, and pass it as an argument",
                )


def _generators() -> list[Any]:
    return [*global_generators(), torch.random.default_generator]


def _let_go(error: Exception) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


def saved_states(torch_s: bool = True) -> list[tuple[Any, Any]]:
    """The generators from which iterators may draw, with their states.

    Args:
        torch_s: torch's as well.
    """
    return [
        (each, read_state(each)) for each in (_generators() if torch_s else global_generators())
    ]
