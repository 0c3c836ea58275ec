"""Arrays of numpy's among the arguments of a step.

    def step(batch, indices): … batch[indices] …      one graph, whatever is in `indices`

Each call computes with its own arrays before its graph runs, as with arrays outside (`live`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.draws.arguments import kind_of_array
from graphopt.tracing.draws.live import LiesInModel, meets
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.failures import definition_of
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.number_expressions import Application

_NAMES = ("class", "dtype", "shape", "strides")


def array_arguments(call: Call) -> list[int]:
    """The positions of the arrays of which each call finds its own, and of numpy's scalars: none
    where the step does with one what nothing can stand for."""
    return [] if call.besides.plain_arrays else _arrays_of(call)


def _arrays_of(call: Call) -> list[int]:
    if "numpy" not in sys.modules:
        return []
    return [position for position in call.constants if _is_given(call.leaves[position])]


def _is_given(value: Any) -> bool:
    if type(value).__module__ != "numpy":
        return False
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.number):
        return type(value) is not numpy.float64  # which is an input of the graph
    return type(value) in (numpy.ndarray, numpy.memmap) and not value.dtype.hasobject


def given_arrays(call: Call, inputs: Inputs, calls: HostCalls) -> dict[int, Any]:
    """What stands for arrays among the arguments, by position.

    Raises:
        CaptureError: an array lies in the memory of a tensor of the model, or of an argument.
    """
    lies_in = LiesInModel([entry.tensor for entry in inputs.module_tensors])
    for position in _arrays_of(call):
        _refuse_shared(call, lies_in, position)
    found: dict[int, Any] = {}
    first: dict[int, int] = {}
    for position in array_arguments(call):
        array = call.leaves[position]
        if id(array) in first:
            found[position] = found[first[id(array)]]
            continue
        first[id(array)] = position
        known = calls.argument(position, array, f"argument {call.names[position]}")
        calls.by_value(Application(lies_in, (known.expression,)), False)
        calls.memory.add_outside(array)
        found[position] = calls.given(known)
    return found


def _refuse_shared(call: Call, lies_in: LiesInModel, position: int) -> None:
    array = call.leaves[position]
    with _compat.without_modes():
        shared = lies_in.searched(array) or _meets_argument(call, array)
    if shared:
        raise CaptureError(
            f"argument {call.names[position]} is an array that lies in the memory of a tensor of"
            " the model, or of another argument",
            location=str(definition_of(call)),
            hint="pass a copy: tensor.numpy().copy(); or let the step read the tensor itself",
        )


def _meets_argument(call: Call, array: Any) -> bool:
    return any(meets(array, call.leaves[position]) for position in call.tensors)


class ArrayArguments:
    """What a graph is specialized on about the arrays of which each call finds its own.

    Args:
        call: the one that was captured.
    """

    def __init__(self, call: Call) -> None:
        self._arrays, found = _arrays_of(call), array_arguments(call)
        self.positions = frozenset(found)
        self._kinds = [(position, kind_of_array(call.leaves[position])) for position in found]
        self._same = list(self._aliases(call))

    def mismatch(self, call: Call) -> str | None:
        """The first array that is of another kind than captured."""
        for position, kind in self._kinds:
            now = kind_of_array(call.leaves[position])
            if now != kind:
                return f"argument {call.names[position]}: {_described(kind, now)}"
        if self._arrays and list(self._aliases(call)) != self._same:
            return "which arguments are the same array, or lie in one memory, changed"
        return None

    def _aliases(self, call: Call) -> Iterator[Any]:
        first: dict[int, int] = {}
        for position in self._arrays:
            array = call.leaves[position]
            yield first.setdefault(id(array), position)
            yield _meets_argument(call, array)


def _described(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    pairs = zip(_NAMES, before, now, strict=False)
    return next((f"{n} {a} became {b}" for n, a, b in pairs if a != b), "it is no array")
