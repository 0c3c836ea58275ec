"""What a function that a step calls on the host finds outside the step: what eager code has there.

    self.n += 1                                    add      = add(n, 1)
    graphopt.callback(lambda: print(self.n))  ==>  callback = graphopt.callback(add)    # is self.n
    self.n = 0

A captured step puts what it leaves in attributes, dictionaries and lists there when a call is over.
What the program has left there before it calls a function is put there for the function, taken back
where the call fails, and not put there again where the function has put something else there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.host.context import while_set
from graphopt.ir.same_values import same_value


class ProgramView(Protocol):
    """Knows, while a step is traced, what it has left outside."""

    def note(self, call: Any) -> list[Any]:
        """Let a call know what its function finds; returns the values that it is given for that."""


_view: ContextVar[ProgramView | None] = ContextVar("view", default=None)


def current_view() -> ProgramView | None:
    """That of the trace that is running."""
    return _view.get()


def viewed_by(view: ProgramView) -> AbstractContextManager[None]:
    """While active, calls that are recorded find what `view` knows."""
    return while_set(_view, view)


class Place(Protocol):
    """An attribute, an item or a variable outside the step."""

    @property
    def identity(self) -> Hashable: ...
    def now(self) -> Any: ...
    def write(self, value: Any) -> None: ...


@dataclass(frozen=True)
class GivenValue:
    """Value `index` among those that a call is given for what its function finds."""

    index: int


@dataclass(frozen=True)
class LiveValue:
    """A tensor of the program itself, or a setting of its scheduler, which `live` gives."""

    owner: Any
    live: Callable[[], Any]


@dataclass(frozen=True)
class LeftValue:
    """What the program has left somewhere.

    Attributes:
        spec: its structure, a pytree's; None of what is one value.
        leaves: what is in it: constants, marks of what is another one in each call, and values that
            are put together of these.
    """

    spec: Any
    leaves: tuple[Any, ...]

    @property
    def is_constant(self) -> bool:
        return not any(isinstance(leaf, (GivenValue, LiveValue, LeftValue)) for leaf in self.leaves)

    def made(self, values: Sequence[Any]) -> Any:
        """The value in one call; tensors that the graph has computed are copies."""
        leaves = [_made(leaf, values) for leaf in self.leaves]
        return leaves[0] if self.spec is None else _compat.tree_unflatten(leaves, self.spec)

    def repeats(self, other: LeftValue) -> bool:
        """Whether another trace has left the same."""
        return self.spec == other.spec and all(map(_is_same, self.leaves, other.leaves))


def _made(leaf: Any, values: Sequence[Any]) -> Any:
    if isinstance(leaf, LiveValue):
        return leaf.live()
    if isinstance(leaf, LeftValue):
        return leaf.made(values)
    if not isinstance(leaf, GivenValue):
        return leaf
    value = values[leaf.index]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, LiveValue) and isinstance(other, LiveValue):
        return one.owner is other.owner
    if isinstance(one, LeftValue) and isinstance(other, LeftValue):
        return one.repeats(other)
    if isinstance(one, GivenValue) or isinstance(other, GivenValue):
        return type(one) is type(other)
    return one is other or (type(one) is type(other) and bool(one == other))


@dataclass(frozen=True)
class LeftThere:
    """What the program has left in a place before it calls a function.

    Attributes:
        stamp: which time the program has written to the place, counted over all places.
    """

    place: Place
    value: LeftValue
    stamp: int


@dataclass(frozen=True)
class ReadBehind:
    """A place that the step reads behind the call of a function: which, and where."""

    place: Place
    path: str
    line: str


@dataclass
class Outside:
    """What one call of a function has to do with places outside the step.

    Attributes:
        left: what the function finds there.
        read: what the step reads there behind it.
    """

    left: list[LeftThere] = field(default_factory=list)
    read: list[ReadBehind] = field(default_factory=list)

    def repeats(self, other: Outside) -> bool:
        """Whether another trace of the step has noted the same. A constant that one of them finds
        there already is none that it leaves."""
        ours = {each.place.identity: each.value for each in self.left}
        theirs = {each.place.identity: each.value for each in other.left}
        both = ours.keys() & theirs.keys()
        alone = [v for k, v in [*ours.items(), *theirs.items()] if k not in both]
        return all(value.is_constant for value in alone) and all(
            ours[key].repeats(theirs[key]) for key in both
        )


@dataclass
class _Put:
    """What has been put into a place: the program's stamp, the value, what was there before, and
    when the call began."""

    place: Place
    stamp: int
    value: Any
    before: Any
    first: Any


class PutOutside:
    """What one call of a step has put outside for the functions that it has called."""

    def __init__(self) -> None:
        self._put: dict[Hashable, _Put] = {}

    def show(self, outside: Outside, values: Sequence[Any]) -> None:
        """Put there what a function is to find.

        Args:
            values: what its call is given for that.
        """
        for each in outside.left:
            self._leave(each, values)

    def _leave(self, left: LeftThere, values: Sequence[Any]) -> None:
        place, known = left.place, self._put.get(left.place.identity)
        if known is not None and known.stamp == left.stamp:
            has_changed = place.now() is not known.value  # what a function has put there stays
            if has_changed or left.value.is_constant:  # a tensor may have been updated in place
                return
        now = place.now()
        before = now if known is None or now is not known.value else known.before
        first = now if known is None else known.first
        value = left.value.made(values)
        place.write(value)
        self._put[place.identity] = _Put(place, left.stamp, value, before, first)

    def has_changed(self, identity: Hashable, stamp: int | None) -> bool:
        """Whether a function has put something else where the program left something last, that
        with this stamp."""
        known = self._put.get(identity)
        return known is not None and known.stamp == stamp and known.place.now() is not known.value

    def restore(self, stamps: Mapping[Hashable, int]) -> None:
        """Leave places as the call has found them, in which the program does so itself.

        Args:
            stamps: by the identity of the place, of what the program leaves there last.
        """
        for identity, put in self._put.items():
            if stamps.get(identity, put.stamp) != put.stamp:
                put.place.write(put.first)

    def undo(self) -> None:
        """Take back what has been put there; what functions have put there stays."""
        for put in reversed(self._put.values()):
            if put.place.now() is put.value:
                put.place.write(put.before)
        self._put = {}


def refuse_changed(read: Sequence[ReadBehind], before: Sequence[Any]) -> None:
    """Refuse a function that has changed what the step reads behind it.

    Args:
        before: what was in the places before the function was called.

    Raises:
        GraphOptError: naming the place, and the line that reads it.
    """
    for each, value in zip(read, before, strict=True):
        if not _is_still(each.place.now(), value):
            raise GraphOptError(
                "a function that the step calls on the host (graphopt.callback, or a scheduler)"
                f" changes {each.path}, which the step reads behind the call: {each.line}. The"
                " captured step has what was there before\n"
                "  hint:  read it before the call, or call the function behind the last line that"
                " reads it; or let the step itself compute what it reads"
            )


_BY_VALUE = (bool, int, float, complex, str, bytes, frozenset)


def _is_still(now: Any, before: Any) -> bool:
    return same_value(now, before, lambda value: isinstance(value, _BY_VALUE))
