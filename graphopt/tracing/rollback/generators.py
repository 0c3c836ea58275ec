"""Random number generators of Python and numpy: their states, and the calls that draw from them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType
from typing import Any

import torch

from graphopt._compat.threads import other_threads_run
from graphopt.ir.user_frames import frames, is_around_step
from graphopt.tracing.interception.replaced_functions import original, replaced
from graphopt.tracing.refusals.host_work import HostWork

_MODULES = ("numpy.random", "numpy.random.mtrand")


def _kinds() -> tuple[type, ...]:
    """The classes of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.Random,)
    return (random.Random, numpy.RandomState, numpy.Generator, numpy.BitGenerator)


def is_generator(value: object) -> bool:
    """True if a value is a random number generator whose state can be read, other than torch's
    default one, which a trace leaves alone."""
    if isinstance(value, random.SystemRandom) or value is torch.random.default_generator:
        return False
    return isinstance(value, (torch.Generator, *_kinds()))


def may_be_shared(value: object) -> bool:
    """True if a value is a generator of Python or numpy. Other threads may draw from it as well,
    and then its state does not tell who has drawn."""
    return is_generator(value) and not isinstance(value, torch.Generator)


def read_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def same_states(one: Any, other: Any) -> bool:
    """True if two states of a generator lead to the same draws."""
    if isinstance(one, dict):
        return all(same_states(value, other[key]) for key, value in one.items())
    return bool(one.tolist() == other.tolist() if hasattr(one, "tolist") else one == other)


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
        drawn = (each for each, state in self._states if not same_states(read_state(each), state))
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


@contextmanager
def undrawn() -> Iterator[None]:
    """While active, draws from the global generators of Python and numpy are refused, by whatever
    code, but for modules that are imported meanwhile: these draw from copies, since other threads
    draw from the generators as well."""
    with replaced(*_refusing_functions()):
        yield


def _refusing_functions() -> Iterator[tuple[Any, str, Any]]:
    """The functions of modules that draw, with what stands for them."""
    copies = [(each, _copied(each)) for each in global_generators()]
    for module in filter(None, map(sys.modules.get, ("random", "numpy.random"))):
        for name, function in list(vars(module).items()):
            owner = getattr(function, "__self__", None)
            for generator, copy in copies:
                if owner is generator:
                    yield module, name, _refusing(generator, name, getattr(copy, name))


def _refusing(generator: Any, name: str, of_copy: Callable[..., Any]) -> Callable[..., Any]:
    what = f"{said(generator)}.{name}()"

    def drawn(*args: Any, **options: Any) -> Any:
        if name in _ASKING or _is_imported(sys._getframe(1)):
            return of_copy(*args, **options)
        raise HostWork.DRAW.refused(what)

    return drawn


_ASKING = frozenset({"getstate", "get_state"})


def _is_imported(frame: FrameType) -> bool:
    """True if a call is made by a module that is being imported in the step."""
    within = takewhile(lambda each: not is_around_step(each), frames(frame))
    return any(each.f_code.co_filename.startswith("<frozen importlib") for each in within)


def _copied(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        made: Any = random.Random()
    else:
        made = type(generator)(type(generator._bit_generator)())
    write_state(made, read_state(generator))
    return made


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
    if _makes_generator(callee) and (not args or args[0] is None):
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


def _makes_generator(callee: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    if isinstance(callee, type):
        kinds = _kinds() if numpy is None else (*_kinds(), numpy.SeedSequence)
        return issubclass(callee, kinds)
    return numpy is not None and callee is numpy.default_rng


def said(generator: Any) -> str:
    """The name of a generator in messages."""
    names = dict(zip(map(id, global_generators()), ("random", "numpy.random"), strict=False))
    return names.get(id(generator), type(generator).__name__)
