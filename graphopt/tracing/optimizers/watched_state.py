"""Optimizer state that records reads by the step during the trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class WatchedState(defaultdict[Any, Any]):
    """An optimizer's state that records reads outside the optimizer's own step.

    Attributes:
        is_watched: the step runs, and that of no optimizer.
        begins_otherwise: it has looked, or a first step would not leave what a later one does.
    """

    is_watched = False
    begins_otherwise = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._note()
        return super().__reduce_ex__(protocol)

    def _note(self) -> None:
        self.begins_otherwise |= self.is_watched


def note_other_beginning(state: Any) -> None:
    """Records that a step that makes this state would not leave what a later one does."""
    if isinstance(state, WatchedState):
        state.begins_otherwise = True


def _noting(name: str) -> Any:
    former = getattr(defaultdict, name)

    def method(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return former(self, *args, **kwargs)

    return method


for _name in (
    *("__len__", "__iter__", "__contains__", "__getitem__", "__setitem__", "__delitem__", "__eq__"),
    *("__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__reversed__", "__copy__"),
    *("get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy"),
):
    setattr(WatchedState, _name, _noting(_name))


@contextmanager
def watched(states: Iterable[Any], *, on: bool = True) -> Iterator[None]:
    """While active, reads of the given states are recorded, or are not if `on` is False."""
    states = [state for state in states if isinstance(state, WatchedState)]
    before = [state.is_watched for state in states]
    for state in states:
        state.is_watched = on
    try:
        yield
    finally:
        for state, former in zip(states, before, strict=True):
            state.is_watched = former
