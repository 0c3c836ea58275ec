"""Addresses of values in an optimizer's state, under a parameter or another key.

state[parameter]["exp_avg"]      of a parameter
state["groups"]["step"]          in a table of no parameter
state["k"]                       by itself
state[parameter]["Q"][0]         in a list, tuple or dictionary of one of these
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
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
    """A top-level key of optimizer state that is no parameter."""

    key: Any

    @property
    def fqn(self) -> str:
        """The key as text, by which its state is named."""
        return str(self.key)


_NESTS = frozenset({list, tuple, dict})


@dataclass(frozen=True)
class NestedStateKey:
    """The second key of a nested container in optimizer state, and the path inside it."""

    key: Any
    path: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.key}{''.join(f'[{each!r}]' for each in self.path)}"


def tensors_of(key: Any, value: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields all tensors under a second key, each with its full key."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif type(value) in _NESTS:
        at, path = (key.key, key.path) if isinstance(key, NestedStateKey) else (key, ())
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(NestedStateKey(at, (*path, step)), item)


def value_at(entries: dict[Any, Any], key: Any) -> Any:
    """The value under a second key or nested key, or None."""
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
    """True if a value is a container that may hold state tensors."""
    return type(value) in _NESTS


def same_nest(a: Any, b: Any) -> bool:
    """True if two values are one object, or nests of the same objects."""
    if type(a) is not type(b) or not is_nest(a):
        return a is b
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same_nest, a.values(), b.values()))
    return all(map(same_nest, a, b))


def entries_at(value: Any) -> dict[Any, Any]:
    """The entries under one top-level key of the state, by second key."""
    return value if isinstance(value, dict) else {ITSELF: value}


def has(state: State, owner: Any, key: Any) -> bool:
    """True if the state has a value under these keys."""
    return owner in state and key in entries_at(state[owner])


def read(state: State, owner: Any, key: Any) -> Any:
    """The value under these keys of the state, or None."""
    return value_at(entries_at(state[owner]), key) if owner in state else None


def write(state: State, owner: Any, key: Any, value: Any) -> None:
    """Stores a value under these keys of the state."""
    if key == ITSELF and not isinstance(owner, torch.Tensor):
        state[owner] = value
    else:
        state.setdefault(owner, {})[key] = value


def distinct_states(optimizers: Sequence[Optimizer]) -> Iterator[tuple[int, Optimizer]]:
    """Yields numbered optimizers, except wrappers that share the state of another one."""
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        if id(optimizer.state) not in seen:
            seen.add(id(optimizer.state))
            yield number, optimizer


def of_none(state: State) -> Iterator[tuple[NonParameterKey, dict[Any, Any]]]:
    """Yields the state under keys that are no parameters."""
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):
            yield NonParameterKey(key), entries_at(value)


def is_known_kind(key: Any, value: Any) -> bool:
    """True if a graph can represent the value under a key of the state."""
    if isinstance(key, torch.Tensor):
        return isinstance(value, dict)
    values = value.values() if type(value) is dict else (value,)
    return is_plain(key) and all(isinstance(v, torch.Tensor) or is_plain(v) for v in values)
