"""Where a value stands in the state of an optimizer: that of a parameter, or of none.

state[parameter]["exp_avg"]      of a parameter
state["groups"]["step"]          in a table of no parameter
state["k"]                       by itself
state[parameter]["Q"][0]         in a list, tuple or dictionary of one of these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt.guards.values import is_plain

State = MutableMapping[Any, Any]

ITSELF = "(itself)"
"""Stands for the second key of a value that stands in the state by itself."""


@dataclass(frozen=True)
class NonParameterKey:
    """A key of the state that is no parameter."""

    key: Any

    @property
    def fqn(self) -> str:
        """What state of no parameter is called: its key."""
        return str(self.key)


_NESTS = frozenset({list, tuple, dict})


@dataclass(frozen=True)
class NestedStateKey:
    """The second key of a nest in the state, and the positions and keys that lead on from there."""

    key: Any
    path: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.key}{''.join(f'[{each!r}]' for each in self.path)}"


def tensors_of(key: Any, value: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """All tensors that stand at a second key, each with its own."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif type(value) in _NESTS:
        at, path = (key.key, key.path) if isinstance(key, NestedStateKey) else (key, ())
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(NestedStateKey(at, (*path, step)), item)


def value_at(entries: dict[Any, Any], key: Any) -> Any:
    """What stands at a second key, or within a nest there; None where nothing does."""
    if not isinstance(key, NestedStateKey):
        return entries.get(key)
    value: Any = entries.get(key.key)
    try:
        for step in key.path:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def is_nest(value: Any) -> bool:
    """Whether a value is a container in which tensors of the state may stand."""
    return type(value) in _NESTS


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest made anew, of what `change` gives for its leaves; a leaf: what it gives for that."""
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) in _NESTS:
        return type(value)(mapped(item, change) for item in value)
    return change(value)


def same_nest(a: Any, b: Any) -> bool:
    """Whether two values are one object, or nests of the same objects."""
    if type(a) is not type(b) or not is_nest(a):
        return a is b
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same_nest, a.values(), b.values()))
    return all(map(same_nest, a, b))


def entries_at(value: Any) -> dict[Any, Any]:
    """What stands at one key of the state, by the second key."""
    return value if isinstance(value, dict) else {ITSELF: value}


def has(state: State, owner: Any, key: Any) -> bool:
    """Whether something stands there."""
    return owner in state and key in entries_at(state[owner])


def read(state: State, owner: Any, key: Any) -> Any:
    """What stands there; None where nothing does."""
    return value_at(entries_at(state[owner]), key) if owner in state else None


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


def of_none(state: State) -> Iterator[tuple[NonParameterKey, dict[Any, Any]]]:
    """What stands in the state of no parameter."""
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            yield NonParameterKey(key), entries_at(value)


def is_known_kind(key: Any, value: Any) -> bool:
    """Whether a graph can hold what stands at a key of the state."""
    if isinstance(key, torch.Tensor):
        return isinstance(value, dict)
    values = value.values() if type(value) is dict else (value,)
    return is_plain(key) and all(isinstance(v, torch.Tensor) or is_plain(v) for v in values)
