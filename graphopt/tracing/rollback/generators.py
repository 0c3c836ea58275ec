"""Random number generators of Python and numpy: their states, and the calls that draw from them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphopt._compat.threads import other_threads_run
from graphopt.tracing.interception.replaced_functions import original, replaced

_MODULES = ("numpy.random", "numpy.random.mtrand")


def _kinds() -> tuple[type, ...]:
    """The classes of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.Random,)
    return (random.Random, numpy.RandomState, numpy.Generator, numpy.BitGenerator)


def read_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.get_state(legacy=False)


def write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        generator.set_state(state)


def differs(one: Any, other: Any) -> bool:
    """True if two states of a generator lead to different draws."""
    return bool(_comparable(one) != _comparable(other))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


class GeneratorStates:
    """States of the global generators of Python and numpy as they are when this is made."""

    def __init__(self) -> None:
        self._states = [(each, read_state(each)) for each in global_generators()]
        self._shared = other_threads_run()

    def advanced(self) -> str | None:
        """The generator from which has been drawn since, as messages name it; None also where that
        may have been other threads."""
        if self._shared or other_threads_run():
            return None
        drawn = (each for each, state in self._states if differs(read_state(each), state))
        return next(map(said, drawn), None)


@contextmanager
def undisturbed() -> Iterator[None]:
    """While active, draws from global generators leave no trace afterwards. Where other threads may
    draw meanwhile, nothing is put back."""
    shared = other_threads_run()
    before = [(each, read_state(each)) for each in global_generators()]
    try:
        yield
    finally:
        if not shared and not other_threads_run():
            for generator, state in before:
                write_state(generator, state)


class GeneratorCopies:
    """Copies of the global generators of Python and numpy, from which a trace draws in their place:
    other threads draw from them as well, and a step that draws is refused."""

    def __init__(self) -> None:
        self._copies = [(each, _copied(each)) for each in global_generators()]
        self._before = [read_state(copy) for _, copy in self._copies]

    def functions(self) -> Iterator[tuple[Any, str, Any]]:
        """The functions of the modules that draw, each with that of the copy, for `replaced`."""
        for module in filter(None, map(sys.modules.get, ("random", "numpy.random"))):
            for name, function in list(vars(module).items()):
                owner = getattr(function, "__self__", None)
                for generator, copy in self._copies:
                    if owner is generator:
                        yield module, name, getattr(copy, name)

    def drawn(self) -> str | None:
        """The generator in whose place the trace has drawn, as messages name it."""
        for (generator, copy), before in zip(self._copies, self._before, strict=True):
            if differs(read_state(copy), before):
                return said(generator)
        return None


def _copied(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        made: Any = random.Random()
    else:
        made = type(generator)(type(generator._bit_generator)())
    write_state(made, read_state(generator))
    return made


@contextmanager
def drawn_from_copies() -> Iterator[GeneratorCopies]:
    """While active, the trace draws from copies of the global generators of Python and numpy."""
    global _copies
    before, _copies = _copies, GeneratorCopies()
    try:
        with replaced(*_copies.functions()):
            yield _copies
    finally:
        _copies = before


_copies: GeneratorCopies | None = None


def is_drawn_from_copies() -> bool:
    """True if the running trace has drawn from a copy of Python's or numpy's generator."""
    return _copies is not None and _copies.drawn() is not None


def global_generators() -> list[Any]:
    """The generators behind the functions of `random` and `numpy.random`."""
    found = [_owner(random.random)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(_owner(numpy.random_sample))
    return found


def _owner(method: Any) -> Any:
    return original(method).__self__


def draw_of(callee: Any, args: Sequence[Any], is_outside: Callable[[Any], bool]) -> str | None:
    """The name in messages of a call that draws from a Python or numpy generator; None for other
    calls. A generator that the step makes itself, from a seed, draws the same numbers in each call.

    Args:
        args: positional values, the object of a method first, and those of keywords.
        is_outside: whether an object was there before the step.
    """
    name = getattr(callee, "__name__", "")
    generator = _generator_of(callee, name, args)
    if generator is not None:
        told = any(generator is each for each in global_generators()) or is_outside(generator)
        return f"{said(generator)}.{name}()" if told else None
    if _makes_generator(callee, name) and (not args or args[0] is None):
        return f"{name}() without a seed"
    module = getattr(callee, "__module__", None)
    drawing = module == "secrets" or (module == "uuid" and name in ("uuid1", "uuid4"))
    if drawing or callee is os.urandom:
        return f"{module}.{name}()"
    return None


def _generator_of(callee: Any, name: str, args: Sequence[Any]) -> Any:
    """The generator that a callee is a public method of, or None."""
    if name.startswith("_"):
        return None
    kinds, owner = _kinds(), getattr(callee, "__self__", None)
    if isinstance(owner, kinds):
        return owner
    if args and isinstance(args[0], kinds) and getattr(type(args[0]), name, None) is callee:
        return args[0]
    numpy = sys.modules.get("numpy.random")
    if numpy is None or getattr(callee, "__module__", None) not in _MODULES:
        return None
    made_of = isinstance(callee, type) or name == "default_rng"  # what makes a generator
    return None if made_of or getattr(numpy, name, None) is not callee else global_generators()[1]


def _makes_generator(callee: Any, name: str) -> bool:
    numpy = sys.modules.get("numpy.random")
    if isinstance(callee, type):
        kinds = _kinds() if numpy is None else (*_kinds(), numpy.SeedSequence)
        return issubclass(callee, kinds)
    return numpy is not None and callee is numpy.default_rng


def said(generator: Any) -> str:
    """The name of a generator in messages."""
    names = dict(zip(map(id, global_generators()), ("random", "numpy.random"), strict=False))
    return names.get(id(generator), type(generator).__name__)
