"""Preparation of a region's graph for compilation.

Convolutions run on channels-last images, and that layout is kept from one to the next: they
are fastest so, and Inductor converts what they read. In a graph that holds forward and
backward it converts one activation several times, since it fixes the layout that the backward reads
to that of the graph. Here the graph itself gets the layout.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_output, is_operator
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import is_fused_optimizer
from graphopt.lowering.number_arguments import GraphNumber, is_listed, written_out
from graphopt.lowering.updates import call_update, gradients

aten = torch.ops.aten


def can_change_layout(graph: fx.Graph) -> bool:
    """True if the memory layout of every result and gradient can be restored after a change."""
    updates = [node for node in graph.nodes if is_fused_optimizer(node)]
    kept = [*_returned(graph), *(gradient for node in updates for gradient in gradients(node))]
    return all(_memory_format(fake_value(node)) is not None for node in kept)


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return cast(list[fx.Node], get_output(graph).args[0])


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return None


class PreparedRegion(fx.Interpreter):
    """Interprets a region's graph in the form that Inductor compiles.

    Operators on lists and numbers are written out. Updates of inputs come last: whoever reads an
    updated value in the region reads what it is updated to. Decompositions may give results other
    strides than the operators they stand for; a view of such a result may need a copy, and what the
    region returns gets its strides back.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._updates: list[tuple[torch.Tensor, torch.Tensor]] = []

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = super().placeholder(target, args, kwargs)
        is_number = isinstance(known_value(self._node), torch.SymFloat)
        return GraphNumber(value) if is_number else value

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_operator(target, "aten::copy_"):
            if args[0] is not args[1]:
                self._updates.append((args[0], args[1]))
            return args[1]
        if is_fused_optimizer(self._node):
            return call_update(target, self._laid_out(args), kwargs)
        if target in (aten.view.default, aten._unsafe_view.default):
            return aten.reshape.default(*args, **kwargs)
        leaves = _compat.tree_leaves((args, kwargs))
        if (
            is_listed(self._node)
            or _has_factor(self._node)
            or any(isinstance(leaf, GraphNumber) for leaf in leaves)
        ):
            return written_out(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = [fake_value(source) for source in _returned(self.graph)]
        results = [_restored(value, like) for value, like in zip(args[0], wanted, strict=True)]
        self.update_inputs()
        return results

    def _laid_out(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a fused optimizer, with gradients in the layout that the graph has."""
        wanted = [fake_value(source) for source in gradients(self._node)]
        restored = [_restored(value, like) for value, like in zip(args[1], wanted, strict=True)]
        return args[0], restored, *args[2:]

    def update_inputs(self) -> None:
        """Writes the updates of inputs, after everything else."""
        for state, value in self._updates:
            state.copy_(value)


def _has_factor(node: fx.Node) -> bool:
    """True for an addition that scales its second operand: Inductor loses the factor next to a
    matrix product (seen in torch 2.13)."""
    if not is_operator(node.target, "aten::add", "aten::sub"):
        return False
    return bool(node.kwargs.get("alpha", 1) != 1)


class ChannelsLast(PreparedRegion):
    """Interprets a graph with the inputs of convolutions laid out channels-last."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._converted: dict[torch.Tensor, torch.Tensor] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_operator(target, "aten::convolution"):
            args = (*map(self._channels_last, args[:2]), *args[2:])
        elif is_operator(target, "aten::convolution_backward"):
            args = (*map(self._channels_last, args[:3]), *args[3:])
        return super().call_function(target, args, kwargs)

    def _channels_last(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() != 4:
            return value
        if value not in self._converted:
            converted = value.contiguous(memory_format=torch.channels_last)
            self._converted[value] = converted
        return self._converted[value]


def _restored(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    layout = _memory_format(like)
    if value.stride() == like.stride() or layout is None:
        return value
    return value.contiguous(memory_format=layout)
