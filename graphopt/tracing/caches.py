"""Functions behind `functools.lru_cache` that give tensors.

Eager code runs such a function once for its arguments; from then on it gets the very tensors that
the function gave it. A trace must leave no stand-in in the cache, and the graph takes the tensors
from there as from any place outside:

    trace 1   mask(8) ─ runs on stand-ins ─▶ these are taken out of the cache again
              mask(8) ─ is called as the program would ─▶ the cache holds tensors
    trace 2   mask(8) ─ gives what is there: an input of the graph
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from graphopt import _compat
from graphopt._compat.threads import taking_turns
from graphopt._compat.untraced import untraced
from graphopt.errors import CaptureError
from graphopt.ir.operators.table import row
from graphopt.ir.user_frames import current_user_line
from graphopt.tracing.generators import draws_noted
from graphopt.tracing.inputs.implicit import Finder
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.substitute import GeneratorStates

_WRAPPER = functools._lru_cache_wrapper


class CachedCall(NamedTuple):
    """A call of a function with a cache."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def is_traced(self) -> bool:
        """Whether it is given what only the trace has."""
        return any(map(is_traced, _compat.tree_leaves((self.args, self.kwargs))))

    def is_known(self) -> bool:
        """Whether the function would give what it has given before."""
        kind = self.function.cache_parameters()
        table = _table(self.function)
        if table is None:
            return False
        mark = (each for each in gc.get_referents(self.function) if type(each) is object)
        key = self.args
        if self.kwargs:
            key += (next(mark, None), *chain.from_iterable(self.kwargs.items()))
        if kind["typed"]:
            key += tuple(map(type, (*self.args, *self.kwargs.values())))
        elif len(key) == 1 and type(key[0]) in (int, str):
            (key,) = key
        return key in table

    def make(self) -> None:
        """Let the cache have what the function gives, as the program calls it.

        Raises:
            CaptureError: it draws random numbers: it would do so before what the step draws.
        """
        drawn = GeneratorStates.read()
        with taking_turns(), draws_noted() as noted, _DrawsOfTorch(noted):
            self.function(*self.args, **self.kwargs)
        generator = drawn.advanced(noted)
        if generator is not None:
            drawn.restore(noted)
            self.function.cache_clear()
            raise CaptureError(
                f"a function with a cache ({self.function.__name__}) draws from the {generator}"
                " generator when it is called first",
                hint="call it once before the first step",
            )


class _DrawsOfTorch(_compat.TorchDispatchMode):
    """Notes operators of this thread that draw random numbers."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if row(func).random:
            self._noted.append("torch")
        return func(*args, **(kwargs or {}))


class CachedFunctions:
    """Those that a trace calls."""

    def __init__(self, record: Record, finder: Finder) -> None:
        self._record, self._finder = record, finder
        self._calls: list[CachedCall] = []
        self._tracer: Any = None

    def __call__(self, callee: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What is called in place of a function that the step calls; None: itself."""
        if type(callee) is not _WRAPPER or not self._record.is_outside(callee):
            return None
        return partial(self._called, callee)

    def _called(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        call = CachedCall(function, args, kwargs)
        if call.is_traced() or not call.is_known():
            self._tracer = _compat.current_tracer()
            self._calls.append(call)
            return function(*args, **kwargs)
        result = untraced(partial(function, *args, **kwargs))
        line = current_user_line()
        if line is not None and any(isinstance(each, torch.Tensor) for each in _leaves(result)):
            path = self._record.path(function, getattr(function, "__name__", "a function"))
            said = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
            place = OutsidePlace("cached", function, (args, tuple(kwargs.items())))
            self._record.read(place, f"{path}({', '.join(said)})", line)
        return result

    def close(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Let no cache hold what has been traced.

        Raises:
            CaptureError: what a function has given depends on what the step computes.
        """
        functions = {id(call.function): call.function for call in self._calls}
        for function in functions.values():
            traced = _take_traced(function)
            if error is None and any(_is_computed(self._tracer, value) for value in traced):
                raise CaptureError(
                    f"a function with a cache ({function.__name__}) keeps a tensor that the step"
                    " computes",
                    hint="let it compute what depends on its arguments alone, or call it without"
                    " the cache",
                )
            if traced:
                calls = [call for call in self._calls if call.function is function]
                self._finder.found.cached += [call for call in calls if not call.is_traced()]


def _is_computed(tracer: Any, value: Any) -> bool:
    """Whether a traced value depends on what the graph is given."""
    node = _compat.node_of(tracer, value) if isinstance(value, torch.Tensor) else None
    seen, pending = set(), [node]
    while pending:
        each = pending.pop()
        if each is None or each.op == "placeholder":
            return True
        if each not in seen:
            seen.add(each)
            pending += each.all_input_nodes
    return False


def _take_traced(function: Any) -> list[Any]:
    """Take what has been traced out of a cache."""
    table = _table(function)
    if function.cache_parameters()["maxsize"] is not None or table is None:
        found = [value for value in gc.get_referents(function) for value in _leaves(value)]
        traced = [value for value in found if is_traced(value)]
        if traced:  # it is a list as well, in an order of its own
            function.cache_clear()
        return traced
    found = []
    for key, value in list(table.items()):
        traced = [each for each in _leaves(value) if is_traced(each)]
        if traced:
            del table[key]
            found += traced
    return found


def _table(function: Any) -> dict[Any, Any] | None:
    """The cache of a function, with its keys as `functools` makes them."""
    held = (each for each in gc.get_referents(function) if type(each) is dict)
    return next((each for each in held if each is not vars(function)), None)


def _leaves(value: Any) -> list[Any]:
    return _compat.tree_leaves(value) if isinstance(value, (tuple, list, dict)) else [value]


def is_traced(value: Any) -> bool:
    """Whether a value is one of a trace."""
    return isinstance(value, SYMBOLIC) or (
        isinstance(value, torch.Tensor) and _compat.is_fake(value)
    )
