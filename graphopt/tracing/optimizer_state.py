"""Where a value stands in the state of an optimizer: that of a parameter, or of none.

state[parameter]["exp_avg"]      of a parameter
state["groups"]["step"]          in a table of no parameter
state["k"]                       by itself
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt.tracing.guard_values import is_plain

State = MutableMapping[Any, Any]

ITSELF = "(itself)"
"""Stands for the second key of a value that stands in the state by itself."""


@dataclass(frozen=True)
class OfNone:
    """A key of the state that is no parameter."""

    key: Any

    @property
    def fqn(self) -> str:
        return str(self.key)


def entries_at(value: Any) -> dict[Any, Any]:
    """What stands at one key of the state, by the second key."""
    return value if isinstance(value, dict) else {ITSELF: value}


def has(state: State, owner: Any, key: Any) -> bool:
    """Whether something stands there."""
    return owner in state and key in entries_at(state[owner])


def read(state: State, owner: Any, key: Any) -> Any:
    """What stands there; None where nothing does."""
    return entries_at(state[owner]).get(key) if owner in state else None


def write(state: State, owner: Any, key: Any, value: Any) -> None:
    """Let a value stand there."""
    if key == ITSELF and not isinstance(owner, torch.Tensor):
        state[owner] = value
    else:
        state.setdefault(owner, {})[key] = value


def distinct_states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, Optimizer]]:
    """Optimizers with their numbers, but those that have the state of another one, around which
    they are."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        if id(optimizer.state) not in seen:
            seen.add(id(optimizer.state))
            yield number, optimizer


def of_none(state: State) -> Iterator[tuple[OfNone, dict[Any, Any]]]:
    """What stands in the state of no parameter."""
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            yield OfNone(key), entries_at(value)


def is_known_kind(key: Any, value: Any) -> bool:
    """Whether a graph can hold what stands at a key of the state."""
    if isinstance(key, torch.Tensor):
        return isinstance(value, dict)
    values = value.values() if type(value) is dict else (value,)
    return is_plain(key) and all(isinstance(v, torch.Tensor) or is_plain(v) for v in values)
