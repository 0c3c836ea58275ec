"""What Python computes of values of the graph, where the graph needs it: nodes that compute it
(`graphopt.host.computed`).

    target = torch.from_numpy(scores.numpy() ** 2)     stands for a tensor (`later`)
    loss = F.mse_loss(model(x), target)                is one from here on, also for what follows

Only what values of the graph and constants decide may come back: lists and arrays outside, which a
step changes, are there when it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.arrays import LiveItems, Method
from graphopt.tracing.computations import functions_in
from graphopt.tracing.kept_items import KeptItems
from graphopt.tracing.known_functions import is_fresh, makes_tensor
from graphopt.tracing.later import Later
from graphopt.tracing.named_calls import Named
from graphopt.tracing.outside.changing_texts import TextOutside
from graphopt.tracing.source import current_user_line

_OUTSIDE = (KeptItems, LiveItems, TextOutside)
_NO_TENSORS = frozenset({"item", "tolist", "numpy"})
"""Methods of tensors that give none."""


class GraphValues:
    """Such values of one trace.

    Args:
        compute: makes a tensor of the graph of a value, and says what the value is: a tensor, array
            or number; None where it is nothing of these.
        memory: called with a tensor in whose memory an array lies.
        alone: no other rank runs the same step.
    """

    def __init__(
        self,
        compute: Callable[[Later], tuple[torch.Tensor, str] | None],
        memory: Callable[[torch.Tensor], Any],
        alone: bool,
    ) -> None:
        self._compute, self._memory, self._alone = compute, memory, alone
        self._found: dict[int, tuple[Later, tuple[Any, bool]]] = {}
        self._tensors: list[tuple[torch.Tensor, int, SourceLine | None]] = []

    def of(self, value: Any, index: bool = False) -> Any:
        """A value, also in lists, tuples, dictionaries and slices, as the graph has it; what is
        known before it runs, itself.

        Args:
            index: it says which items are taken.
        """
        kind = type(value)
        if kind is Later:
            return self._of_one(value, index)
        if kind in (list, tuple):
            return kind(self.of(each, index) for each in value)
        if kind is dict:
            return {key: self.of(each, index) for key, each in value.items()}
        if kind is slice:
            return slice(*(self.of(each) for each in (value.start, value.stop, value.step)))
        return value

    def beside(
        self, function: Callable[[Any, Any], Any], tensor: torch.Tensor, value: Later
    ) -> Any:
        """What an operator gives of a tensor and a value on its right; of an array, what numpy
        makes of both.

        Raises:
            RuntimeError: as eager code raises it.
        """
        known, is_array = self._known(value)
        if not is_array:
            return function(tensor, known)
        if tensor.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()"
                " instead."
            )
        return self._of_one(Later(function, (tensor, value)), index=False).clone()

    def takes(self, value: Later) -> bool:
        """Whether a value is known to be a tensor that may be one of the graph."""
        return self._alone and _gives_tensor(value) and _is_of_graph(value)

    def _of_one(self, value: Later, index: bool) -> Any:
        known, is_array = self._known(value)
        if is_array and not index:
            raise value.refused("computes with it and tensors of the graph")
        return known

    def _known(self, value: Later) -> tuple[Any, bool]:
        """A value as the graph has it, and whether it is an array."""
        value = value.as_it_is()
        value.is_used()
        if id(value) not in self._found:
            found = self._compute(value) if _is_of_graph(value) else None
            if found is None:
                raise value.refused("computes with it and tensors of the graph")
            self._found[id(value)] = (value, self._kept(value, *found))
        return self._found[id(value)][1]

    def _kept(self, value: Later, tensor: torch.Tensor, kind: str) -> tuple[Any, bool]:
        if kind == "number":
            return tensor.item(), False
        if kind == "tensor":
            self._tensors.append((tensor, _compat.version_of(tensor), current_user_line()))
            memory = self._memory(tensor)
            sharing = [value]
            while sharing:
                each = sharing.pop()
                each.memories.add(memory)
                if each.own is not None:
                    each.own.is_exported = True
                sharing += () if is_fresh(each.made_by[0]) else each.parts
        return tensor, kind == "array"

    def finish(self) -> None:
        """The step is over.

        Raises:
            CaptureError: it has changed such a tensor.
        """
        tensors, self._tensors, self._found = self._tensors, [], {}
        for tensor, version, line in tensors:
            if _compat.version_of(tensor) != version or tensor.requires_grad:
                raise CaptureError(
                    "it changes a tensor that Python has computed of values of the graph, or asks"
                    " for its gradient",
                    location=str(line),
                    hint="make another one: tensor = tensor.clone()",
                )


class ItemsOfTensor:
    """Takes, or sets, items of a tensor by what only Python computes.

    Args:
        of_graph: see `GraphValues.of`.
    """

    def __init__(self, tensor: torch.Tensor, of_graph: Callable[..., Any]) -> None:
        self._tensor, self._of_graph = tensor, of_graph

    def __getitem__(self, key: Any) -> Any:
        return self._tensor[self._of_graph(key, index=True)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tensor[self._of_graph(key, index=True)] = self._of_graph(value)


def _is_of_graph(value: Later) -> bool:
    """Whether values of the graph and constants alone decide what a value is."""
    return not any(
        isinstance(each, _OUTSIDE) or _asks_gradient(each) for each in functions_in(value)
    )


def _asks_gradient(function: Any) -> bool:
    return isinstance(function, Named) and "requires_grad" in function.names


def _gives_tensor(value: Later) -> bool:
    function, args = value.made_by
    if isinstance(function, Named):
        function = function.function
    if makes_tensor(function):
        return True
    of_first = bool(args) and type(args[0]) is Later and _gives_tensor(args[0])
    if isinstance(function, Method):
        return of_first and function.__name__ not in _NO_TENSORS
    return of_first and getattr(function, "__module__", "") == "_operator"
