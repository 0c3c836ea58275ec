"""Which calls of a step draw on the host, or work on what was drawn, and what is called instead.

Asked before each call that the step's own code makes (`outside.instructions`), in whatever way it
got hold of the function.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt.tracing.array_tensors import ArrayItems, takes_items
from graphopt.tracing.clocks import Clocks
from graphopt.tracing.draws.arguments import Known, any_known, are_constants, is_known
from graphopt.tracing.draws.generators import Drawing, drawing_of
from graphopt.tracing.draws.items import SelectedItems, selects
from graphopt.tracing.draws.picked import PickingItems, Picks, is_position
from graphopt.tracing.draws.positions import BY_POSITION
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.draws.rows import AllRows, are_rows
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.known_functions import is_in
from graphopt.tracing.number_expressions import Application, leaves_of
from graphopt.tracing.positions import takes_positions

if TYPE_CHECKING:
    from graphopt.tracing.outside.record import Record

Substitute = Callable[..., Any]

_MAKERS = frozenset({torch.from_numpy, torch.tensor, torch.as_tensor, torch.asarray})
_MADE = ("arange", "array", "asarray", "asanyarray", "ascontiguousarray", "full",
         "float32", "float64",
         "int32", "int64", "mean", "sum", "std", "var", "median", "max", "amax", "min", "amin",
         "average", "prod", "percentile", "nanmean", "stack", "vstack", "hstack", "concatenate",
         "column_stack", "bool_", "maximum", "minimum", "exp", "sqrt",
         "log", "power", "take")  # fmt: skip
"""Functions and classes of numpy that make arrays and scalars, and are no functions that arrays
may answer themselves."""


class Substitutes:
    """What is called in place of a function.

    Args:
        calls: makes the draws of the trace.
        record: of what the step does outside its arguments.
        makes_arrays: arrays that it makes are made on the host.
        tensors: of the model.

    Attributes:
        rows: the lists that it selects.
    """

    def __init__(
        self,
        calls: HostCalls,
        record: Record,
        makes_arrays: bool = False,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self._calls, self._record, self._makes_arrays = calls, record, makes_arrays
        self._clocks = Clocks(calls.mode)
        self.rows = AllRows(calls)
        self.picks = Picks(calls, record, tensors)
        self._of_numpy: frozenset[Any] = frozenset()
        self._tensors: dict[int, ArrayItems] = {}

    def __call__(self, callee: Any, args: Sequence[Any]) -> Substitute | None:
        """None where the function itself is called.

        Args:
            args: positional values, the object of a method first, and those of keywords.
        """
        if type(callee) is functools.partial:
            return self._partial(callee, args)
        clock = self._clocks.asked(callee, args)
        if clock is not None:
            return clock
        drawing = drawing_of(callee, args)
        if drawing is not None:
            return self.picks.drawer(drawing, args) or self._draw(drawing)
        if callee is operator.getitem and len(args) == 2 and takes_items(*args):
            return self._items_of_graph(args[0])
        if _opens_for_reading(callee, args):
            return self._apply(callee)
        if not any_known(args):
            return self._apply(callee) if self._makes_array(callee, args) else None
        if callee is type and len(args) == 1 and is_known(args[0]):
            return self._type
        if callee is operator.getitem and len(args) == 2:
            return self._items(*args)
        if _compat.made_by_legacy(callee) is not None or is_in(callee, _MAKERS):
            return self._tensor(callee) if any(map(self._is_made_on_host, args)) else None
        if is_in(callee, self._numpy()):
            return self._apply(callee)
        placed = takes_positions(callee)
        if placed is not None or (any(map(is_known, args)) and _is_of_torch(callee)):
            return _with_plain(placed or callee)
        return None

    def _makes_array(self, callee: Any, args: Sequence[Any]) -> bool:
        numpy = sys.modules.get("numpy")
        if not self._makes_arrays or numpy is None:
            return False
        return any(callee is each for each in (numpy.arange, numpy.array)) and are_constants(args)

    def _partial(self, callee: functools.partial[Any], args: Sequence[Any]) -> Substitute | None:
        given = [*callee.args, *args, *callee.keywords.values()]
        inner = self(callee.func, given)
        return None if inner is None else functools.partial(inner, *callee.args, **callee.keywords)

    def _items(self, container: Any, key: Any) -> Substitute | None:
        """What gives an item of a container that a number of the call selects."""
        lives = self._calls.is_outside(container)
        if is_position(key) and self.picks.takes(container) and not are_rows(container, key):
            return PickingItems(self.picks, container)
        if lives and self._record.is_changed(container):
            return None
        if lives and are_rows(container, key):
            changed = any(map(self._record.is_changed, container))
            return None if changed else self.rows.of(container)
        if not selects((container, key)):
            return None
        if lives:
            self._record.pin(container)
        return SelectedItems(self._calls, container, lives)

    def _items_of_graph(self, array: Any) -> Substitute | None:
        if not is_known(array):
            if not self._calls.is_outside(array) or self._record.is_changed(array):
                return None
            self._record.pin(array)
        if id(array) not in self._tensors:
            self._tensors[id(array)] = ArrayItems(self._calls, array)
        return self._tensors[id(array)]

    def _type(self, value: Known) -> Any:
        return self._calls.by_value(Application(type, (value.expression,)), type(value.plain))

    def _draw(self, drawing: Drawing) -> Substitute:
        calls = self._calls
        special = BY_POSITION.get(drawing.name)

        def draw(*args: Any, **options: Any) -> Any:
            if not drawing.bound:
                args = args[1:]
            if drawing.of_state or options.get("out") is not None:
                raise calls.refused(
                    f"it uses {drawing.said}, which gives or takes more than random numbers",
                    "do it outside the step",
                )
            if special is not None:
                return special(calls, drawing, *args, **options)
            return calls.draw(drawing, (*args, *options.values()), tuple(options))

        return draw

    def _tensor(self, function: Any) -> Substitute:
        def tensor(*args: Any, **options: Any) -> Any:
            return self._calls.tensor(function, (*args, *options.values()), tuple(options))

        return tensor

    def _apply(self, function: Any) -> Substitute:
        def apply(*args: Any, **options: Any) -> Any:
            return self._calls.apply(function, (*args, *options.values()), tuple(options))

        return apply

    def _is_made_on_host(self, value: Any) -> bool:
        """Whether an array is among what a tensor is made of, or an integer that is drawn: other
        numbers are inputs of the graph, which makes the tensor."""
        if type(value) in (list, tuple):
            return any_known(value) and any(map(self._is_made_on_host, value))
        if is_host_number(value):
            drawn = any(leaf >= self._calls.program.first for leaf in leaves_of(value.expression))
            return drawn and isinstance(value, int)
        return is_known(value)

    def _numpy(self) -> frozenset[Any]:
        numpy = sys.modules.get("numpy")
        if numpy is not None and not self._of_numpy:
            self._of_numpy = frozenset(getattr(numpy, name) for name in _MADE)
        return self._of_numpy


def _opens_for_reading(callee: Any, args: Sequence[Any]) -> bool:
    """Whether a call makes an array of a file, which nobody can write to through it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or callee is not numpy.memmap or not are_constants(args):
        return False
    return any(type(each) is str and each in _READING for each in args[1:])


_READING = ("r", "c", "readonly", "copyonwrite")


def _with_plain(function: Any) -> Substitute:
    def call(*args: Any, **options: Any) -> Any:
        args = tuple(map(_for_torch, args))
        return function(*args, **{name: _for_torch(value) for name, value in options.items()})

    return call


def _for_torch(value: Any) -> Any:
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_for_torch, value))
    return value.for_torch() if is_known(value) else value


def _is_of_torch(callee: Any) -> bool:
    """Whether a function, or the class that it is a method of, belongs to torch."""
    owner = getattr(callee, "__objclass__", None) or getattr(callee, "__self__", None)
    if isinstance(owner, torch.Tensor) or (isinstance(owner, type) and owner.__module__ == "torch"):
        return True
    module = getattr(callee, "__module__", None) or ""
    return str(module).partition(".")[0] == "torch"
