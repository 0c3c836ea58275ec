"""Recipes by which each call rebuilds, from the graph's results, the values that a traced step
left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.effects.written_values import MadeAnew, refused_object
from graphopt.tracing.inputs.entries import Inputs, is_exact, is_number
from graphopt.tracing.outside.places import is_value
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.failures import definition_of
from graphopt.tracing.results.signature import (
    Computed,
    Constant,
    FromCall,
    FromPlace,
    Live,
    Nested,
    Recipe,
    View,
)
from graphopt.tracing.rollback.substitute import StandIns
from graphopt.tracing.scalars.host_numbers import is_host_number, scalar_of_numpy
from graphopt.tracing.scalars.numbers import SYMBOLIC
from graphopt.tracing.tensors.attributes import AttributeChange
from graphopt.tracing.tensors.lost_history import has_history
from graphopt.tracing.tensors.obtained import ObtainedValues

_CONSTANTS = (type(None), int, float, str, bool, complex, bytes, torch.dtype, torch.device)


class Recipes:
    """Builds the recipes of one trace.

    Args:
        flat: what stands for the placeholders of the graph.
        made: what the step has got from torch.
        left_storages: those that parameters had before `.data = …`.
        outside: what was there before the step, or is an argument.
        left: what the step has made and leaves in other places.

    Attributes:
        results: traced values that the graph has to return, in order.
        numbers: those of them that are numbers (by id).
    """

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Inputs,
        traced: StandIns,
        flat: Sequence[torch.Tensor],
        made: ObtainedValues,
        left_storages: Collection[int],
        outside: OutsideRecord,
        left: MadeAnew,
    ) -> None:
        self._is_outside, self._of_call, self._left = outside.is_outside, outside.of_call, left
        self._step, self._made, self._left_storages = step, made, left_storages
        self.results: list[Any] = []
        self._nests: dict[int, tuple[Any, Recipe]] = {}
        self.numbers: set[int] = set()
        self._live: dict[int, Live] = {id(tensor): Live(None, i) for i, tensor in enumerate(flat)}
        self._storages: dict[int, Live] = {
            _compat.storage_key(tensor): Live(None, i)
            for i, tensor in enumerate(flat)
            if tensor.numel()
        }
        self._offsets = {Live(None, i): _bytes_before(t) for i, t in enumerate(flat)}
        for index, entry in enumerate(inputs.module_tensors):
            stand_in = traced.by_id[id(entry.tensor)]
            self._live[id(stand_in)] = self._live[id(entry.tensor)] = Live(index, None)

    def of(self, value: Any, what: str) -> Recipe:
        """The recipe of a tensor, number or constant.

        Args:
            what: it is, in a message.
        """
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, SYMBOLIC):
            self.numbers.add(id(value))
        value = scalar_of_numpy(value)
        if isinstance(value, SYMBOLIC):
            self.numbers.add(id(value))
            return self._result(value)
        if isinstance(value, _CONSTANTS):
            return Constant(value)
        if type(value).__module__ == "numpy" and is_value(value):  # a number, of one type of many
            return Constant(value)
        if id(value) in self._of_call:
            return FromCall(self._of_call[id(value)][1])
        if id(value) in self._left:
            return self.of_nest(value)
        if self._is_outside(value):
            return Constant(value)
        raise CaptureError(
            f"{what} is a {type(value).__name__}, neither a tensor nor a constant, and no object"
            " that is its attributes alone and stands nowhere else",
            hint="return tensors, numbers, strings, None, or containers or objects of them;"
            " register other containers with torch.utils._pytree.register_pytree_node",
        )

    def _result(self, value: Any) -> Computed:
        """Adds a result to the graph, and returns its recipe."""
        self.results.append(value)
        return Computed(len(self.results) - 1, has_history(value))

    def computed(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, Computed]:
        """Adds results to the graph, and returns their recipes by key."""
        return {key: self._result(tensor) for key, tensor in sorted(tensors.items())}

    def _of_tensor(self, tensor: torch.Tensor) -> Recipe:
        live = self._live.get(id(tensor))
        if live is not None:
            return live
        if _compat.storage_key(tensor) in self._left_storages:
            raise CaptureError(
                "it keeps what a parameter was before `.data = …`",
                location=self._made.line_of(tensor) or definition_of(self._step),
                hint="keep a copy: tensor.clone()",
            )
        base = self._storages.get(_compat.storage_key(tensor)) if tensor.numel() else None
        if base is None:
            return self._result(tensor)
        offset = _bytes_before(tensor) - self._offsets[base]
        flags = tensor.is_conj(), tensor.is_neg()
        return View(base, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, flags)

    def of_attribute(self, change: AttributeChange) -> Recipe:
        """The recipe of an attribute's new value."""
        if not change.is_told:
            _refuse_counter(change)
        return self.of_nest(change.after)

    def of_nest(self, value: Any) -> Recipe:
        """The recipe of a nested value, whose containers are new in each call unless they are
        arguments or existed before the step."""
        if id(value) in self._of_call:
            return FromCall(self._of_call[id(value)][1])
        if id(value) in self._left:
            value = self._left[id(value)].nest
        if isinstance(value, (Constant, FromCall, FromPlace)):
            return value
        if self._is_there(value) or is_value(value):
            return Constant(value)
        if id(value) not in self._nests:
            inner, spec = _compat.tree_flatten(value, is_leaf=lambda each: each is not value)
            if spec == _compat.ONE_VALUE:
                return self._of_leaf(value)
            self._nests[id(value)] = value, Nested(spec, tuple(map(self.of_nest, inner)))
        return self._nests[id(value)][1]

    def _of_leaf(self, leaf: Any) -> Recipe:
        """The recipe of a leaf of a nested value."""
        if isinstance(leaf, (torch.Tensor, *SYMBOLIC)):
            return self.of(leaf, "what it leaves outside its arguments")
        if not self._is_outside(leaf):
            raise refused_object(leaf, "an attribute of a tensor", None)
        return Constant(leaf)

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, (list, dict, deque)) and self._is_outside(value)


def _refuse_counter(change: AttributeChange) -> None:
    """Refuses a counter that is no input of the graph; others are found by `note_counted`."""
    before, after = change.before, change.after
    if not is_number(before) or is_exact(before) or is_host_number(before):
        return
    if is_number(after) and before != after:
        raise CaptureError(
            f"it counts in the Python attribute {change.name} ({before!r} became {after!r}), a"
            f" {type(before).__name__} that is no input of a graph",
            hint="count in an int below 2**53 or a float, or keep the count in a tensor: in a"
            " buffer of the model (register_buffer), or in the optimizer's state",
        )


def _bytes_before(tensor: torch.Tensor) -> int:
    """The number of bytes of its storage in front of a tensor."""
    return int(tensor.storage_offset()) * tensor.element_size()
