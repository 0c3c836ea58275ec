"""What Python computes of values of a graph, as the functions that it calls one after another.

    a = x.numpy()           a = numpy(x)
    b = a * 2        ==>    b = mul(a, 2)
    c = b + b / a           d = truediv(b, a)
                            c = add(b, d)          each once, however often it is used

`later` says what stands for such values in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.tracing.later import Later, as_later
from graphopt.tracing.numbers import SYMBOLIC, refusal

_AT_MOST = 50_000
"""Functions that one value may be made by."""


class Computation:
    """Functions called one after another; gives what the last of them gives.

    Args:
        steps: of each its function, the structure of its arguments, and for each leaf of these
            which step gives it; None: the next value that the computation is given.
    """

    def __init__(
        self, steps: Sequence[tuple[Callable[..., Any], Any, tuple[int | None, ...]]]
    ) -> None:
        self._steps = tuple(steps)
        self.__name__ = getattr(steps[-1][0], "__name__", "computation")

    def __call__(self, *values: Any) -> Any:
        supply = iter(values)
        made: list[Any] = []
        for function, spec, sources in self._steps:
            leaves = [next(supply) if source is None else made[source] for source in sources]
            made.append(function(*_compat.tree_unflatten(leaves, spec)))
        return made[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Computation) and self._steps == other._steps

    def __hash__(self) -> int:
        return hash(self.__name__)


def nest_of(value: Any) -> Any:
    """A nest in which functions stand for what they give: what makes it anew calls them. The step
    uses what is in it here."""
    return _compat.tree_map(_opened, value)


def _opened(leaf: Any) -> Any:
    value = as_later(leaf)
    if type(value) is not Later:
        return value
    value.is_used()
    steps: list[Any] = []
    leaves: list[Any] = []
    places: dict[int, int] = {}
    for each in in_order(value):
        function, args = each.made_by
        sources: list[int | None] = []
        given, spec = _compat.tree_flatten(args)
        for one in given:
            if type(one) is Later:
                sources.append(places[id(one)])
            else:
                leaves.append(one)
                sources.append(None)
        places[id(each)] = len(steps)
        steps.append((function, spec, tuple(sources)))
    return _compat.Applied(Computation(steps), leaves)


def in_order(value: Later) -> list[Later]:
    """All values that a value is made by, each once, behind those that it is made by; itself last.

    Raises:
        CaptureError: they are too many.
    """
    found: dict[int, Later] = {}
    waiting = [value]
    while waiting:
        each = waiting[-1]
        inner = [part for part in each.parts if id(part) not in found]
        if inner:
            waiting += reversed(inner)
            continue
        found.setdefault(id(waiting.pop()), each)
    if len(found) > _AT_MOST:
        raise refusal(
            f"a value is computed by more than {_AT_MOST} functions of Python",
            "compute it with tensors, or in graphopt.callback(function, …)",
        )
    return list(found.values())


def evaluated(value: Any, known: Callable[[Any], Any], replaced: Callable[[Any], Any]) -> Any:
    """What a value is in this call.

    Args:
        known: gives numbers and tensors of the trace.
        replaced: says what is called in place of a function.
    """
    if type(value) is not Later:
        return _with(value, {}, known)
    made: dict[int, Any] = {}
    for each in in_order(value):
        function, args = each.made_by
        made[id(each)] = replaced(function)(*_with(args, made, known))
    return made[id(value)]


def _with(value: Any, made: dict[int, Any], known: Callable[[Any], Any]) -> Any:
    if type(value) is Later:
        return made[id(value)]
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        return known(value)
    if type(value) in (list, tuple):
        return type(value)(_with(each, made, known) for each in value)
    if type(value) is dict:
        return {key: _with(each, made, known) for key, each in value.items()}
    return value


def numbers_in(value: Later) -> list[Any]:
    """The numbers and tensors of the trace that a value is made of, and settings of schedulers."""
    found: list[Any] = []
    evaluated(value, found.append, lambda function: lambda *args: None)
    return found


def functions_in(value: Any) -> list[Callable[..., Any]]:
    """The functions that a value is made by."""
    return [each.made_by[0] for each in in_order(value)] if type(value) is Later else []
