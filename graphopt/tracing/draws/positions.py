"""Draws of positions in a sequence: of which one, of several, or of an order of all.

What is drawn depends on the length of a sequence alone, so that the positions are drawn in its
place, from a range. A graph holds for the positions that it was captured with, one for each
outcome; an item of a sequence of numbers may be another one in each call.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from graphopt.tracing.draws.arguments import is_known
from graphopt.tracing.draws.generators import Drawing
from graphopt.tracing.draws.live import is_array
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.inputs import is_exact


def _choice(calls: HostCalls, drawing: Drawing, *args: Any, **options: Any) -> Any:
    if _is_of_numpy(drawing):
        return _by_numpy(calls, drawing, args, options)
    (sequence,) = (*args, *options.values())
    index = calls.draw(drawing, (range(len(sequence)),))
    return _items(calls, sequence, [index])[0]


def _choices(
    calls: HostCalls, drawing: Drawing, population: Any, *args: Any, **options: Any
) -> Any:
    positions = calls.draw(
        drawing, (range(len(population)), *args, *options.values()), tuple(options)
    )
    return _items(calls, population, positions)


def _items(calls: HostCalls, sequence: Sequence[Any], positions: Sequence[Any]) -> list[Any]:
    """What stands at positions that were drawn."""
    if not _are_numbers(sequence):
        return [sequence[operator.index(each)] for each in positions]
    items = tuple(sequence)
    return [calls.apply(operator.getitem, (items, each)) for each in positions]


def _shuffle(calls: HostCalls, drawing: Drawing, x: Any, *args: Any, **options: Any) -> None:
    if is_known(x) and not x.is_scalar:
        if not calls.may_change(x):
            raise calls.refused(
                f"{drawing.said} changes the order of an array in whose memory a tensor, or another"
                " array, may lie",
                "make the tensor a copy, torch.tensor(array); or shuffle array.copy()",
            )
        calls.drawn(drawing, (x, *args, *options.values()), tuple(options))
        return
    if is_array(x) and not calls.is_outside(x):
        calls.makes_arrays()
    if type(x) is not list or args or options:
        _refuse_array(calls, drawing)
    order = calls.draw(drawing._replace(function=_order(drawing.function)), (len(x),))
    x[:] = [x[operator.index(position)] for position in order]


def _permutation(calls: HostCalls, drawing: Drawing, x: Any, *args: Any, **options: Any) -> Any:
    return _by_numpy(calls, drawing, (x, *args), options)


def _by_numpy(
    calls: HostCalls, drawing: Drawing, args: Sequence[Any], options: dict[str, Any]
) -> Any:
    return calls.draw(drawing, (*args, *options.values()), tuple(options))


def _refuse_array(calls: HostCalls, drawing: Drawing) -> NoReturn:
    raise calls.refused(
        f"{drawing.said} changes the order of what is no list, nor an array that the step makes",
        "take a random order instead: array[numpy.random.permutation(len(array))], or"
        " tensor[torch.randperm(len(tensor))]",
    )


class _order:
    """Draws an order of `length` items, as `shuffle` leaves a list of their positions."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self._shuffle = shuffle
        self.__name__ = "shuffle"

    def __call__(self, length: int) -> list[int]:
        positions = list(range(length))
        self._shuffle(positions)
        return positions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _order) and other._shuffle == self._shuffle

    def __hash__(self) -> int:
        return hash(self._shuffle)


def _are_numbers(sequence: Any) -> bool:
    """Whether all items are numbers of one kind, which a graph may take."""
    items = list(sequence)
    return 0 < len(items) <= 1000 and all(map(is_exact, items)) and len(set(map(type, items))) == 1


def _is_of_numpy(drawing: Drawing) -> bool:
    return "numpy" in sys.modules and type(drawing.generator).__module__.startswith("numpy")


BY_POSITION: dict[str, Callable[..., Any]] = {
    "choice": _choice,
    "choices": _choices,
    "sample": _choices,
    "shuffle": _shuffle,
    "permutation": _permutation,
}
"""Methods of generators that are given a sequence, by name."""
