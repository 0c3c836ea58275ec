"""The generators of Python and numpy, their states, and which of their methods draw."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_OF_STATES = frozenset({"getstate", "setstate", "get_state", "set_state", "spawn"})
"""Methods that give or take the whole state, which is no random number."""
_DISCRETE = frozenset({"choice", "choices", "sample", "shuffle", "permutation", "permuted"})
"""Methods whose results are among what they are given."""
_MODULES = ("numpy.random", "numpy.random.mtrand")
_ALIASES = frozenset({"sample", "ranf"})
"""Functions of `numpy.random` for `random_sample`."""


def kinds() -> tuple[type, ...]:
    """The classes of generators whose draws are followed."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.Random,)
    return (random.Random, numpy.RandomState, numpy.Generator)


def read_state(generator: Any) -> Any:
    """All that decides what a generator draws next."""
    if type(generator) is random.Random:
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def write_state(generator: Any, state: Any) -> None:
    """Put a generator back."""
    if type(generator) is random.Random:
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two states are alike."""
    return bool(_comparable(one) == _comparable(other))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextmanager
def undisturbed() -> Iterator[None]:
    """While active, code draws from the global generators without anybody seeing it afterwards."""
    before = [(each, read_state(each)) for each in global_generators()]
    try:
        yield
    finally:
        for generator, state in before:
            write_state(generator, state)


def is_global(generator: Any) -> bool:
    """Whether a generator is one of these."""
    return any(generator is each for each in global_generators())


def global_generators() -> list[Any]:
    """Those behind the functions of `random` and `numpy.random`."""
    found = [_owner(random.random)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(_owner(numpy.random_sample))
    return found


def _owner(method: Any) -> Any:
    return method.__self__


class Drawing(NamedTuple):
    """A call that draws.

    Attributes:
        generator: from which.
        name: of its method.
        function: the method, bound.
        bound: the call does not give the generator.
    """

    generator: Any
    name: str
    function: Callable[..., Any]
    bound: bool

    @property
    def of_state(self) -> bool:
        """Whether it gives or takes the state of the generator."""
        return self.name in _OF_STATES

    @property
    def is_discrete(self) -> bool:
        """Whether it draws one of a few values."""
        return self.name in _DISCRETE

    @property
    def said(self) -> str:
        """How messages name it."""
        if self.generator is _owner(random.random):
            return f"random.{self.name}()"
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.generator is _owner(numpy.random_sample):
            return f"numpy.random.{self.name}()"
        return f"{type(self.generator).__name__}.{self.name}()"


def drawing_of(callee: Any, args: Sequence[Any]) -> Drawing | None:
    """What a call draws; None where its function is no method of a generator.

    Args:
        args: positional values, and those of keywords behind them.
    """
    known = kinds()
    owner = getattr(callee, "__self__", None)
    if type(owner) in known:
        return _drawing(owner, callee, bound=True)
    if args and type(args[0]) in known and callable(callee):
        name = getattr(callee, "__name__", "")
        method = getattr(type(args[0]), name, None)
        if method is callee:
            return _drawing(args[0], callee, bound=False)
    return _of_numpy_module(callee)


def _drawing(generator: Any, callee: Any, *, bound: bool) -> Drawing | None:
    name = getattr(callee, "__name__", "")
    if name.startswith("_") or not hasattr(generator, name):
        return None
    return Drawing(generator, name, callee if bound else getattr(generator, name), bound)


def _of_numpy_module(callee: Any) -> Drawing | None:
    """`numpy.random.seed` and the like, which are functions that call a method."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None or getattr(callee, "__module__", None) not in _MODULES:
        return None
    name = getattr(callee, "__name__", "")
    generator = _owner(numpy.random_sample)
    if name in _ALIASES and getattr(numpy, name, None) is callee:
        return Drawing(generator, name, numpy.random_sample, bound=True)
    if getattr(numpy, name, None) is not callee or not hasattr(generator, name):
        return None
    return Drawing(generator, name, getattr(generator, name), bound=True)
