"""Marker operators: placeholders for communication in a captured graph.

    reduce_gradient(g, "layer.weight", ranks, group)     the gradient that all ranks are to have
    sync_buffers([b, …], ["bn.mean", …], ranks, group)   the buffers that all ranks are to have

A marker gives new tensors of the kinds that it takes. It says what is to be shared by which ranks,
and not how: that is said by a kind of parallelism, which the stage `parallelize` lets expand the
markers. No marker is left after it, and none ever runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, find_nodes
from graphopt.ir.metadata import fake_value, set_phase
from graphopt.ir.operators import is_marker, is_operator

_library = torch.library.Library("graphopt", "FRAGMENT")
_library.define(
    "reduce_gradient(Tensor gradient, str parameter, int group_size, str group_name) -> Tensor"
)
_library.define(
    "sync_buffers(Tensor[] buffers, str[] names, int group_size, str group_name) -> Tensor[]"
)


def _reduced_kind(
    gradient: torch.Tensor, parameter: str, group_size: int, group_name: str
) -> torch.Tensor:
    """The shape rule of `reduce_gradient`: dense, with the strides of an operator's result."""
    return torch.empty_like(torch.mul(gradient, 1.0))


def _synced_kinds(
    buffers: Sequence[torch.Tensor], names: Sequence[str], group_size: int, group_name: str
) -> list[torch.Tensor]:
    """The shape rule of `sync_buffers`: contiguous tensors."""
    return [torch.empty_like(b, memory_format=torch.contiguous_format) for b in buffers]


def _never_runs(*args: Any) -> Any:
    raise RuntimeError("a marker has no values: graphopt.parallel.parallelize expands it")


for _name, _kinds in (("reduce_gradient", _reduced_kind), ("sync_buffers", _synced_kinds)):
    _library.impl(_name, _never_runs, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphopt::{_name}", _kinds, lib=_library)


@dataclass(frozen=True)
class Group:
    """A process group in the form that collective operators take.

    Attributes:
        name: as functional collectives take it.
        ranks: how many there are.
    """

    name: str
    ranks: int


def reduce_gradient(gradient: torch.Tensor, parameter: str, group: Group) -> torch.Tensor:
    """Marks a parameter's gradient for reduction; returns a stand-in for the reduced one."""
    marker = torch.ops.graphopt.reduce_gradient
    return cast(torch.Tensor, marker(gradient, parameter, group.ranks, group.name))


def sync_buffers(
    buffers: Sequence[torch.Tensor], names: Sequence[str], group: Group
) -> list[torch.Tensor]:
    """Marks a module's buffers to be made equal on all ranks; returns stand-ins for the results."""
    marker = torch.ops.graphopt.sync_buffers
    return cast(list[torch.Tensor], marker(buffers, names, group.ranks, group.name))


def markers_of(graph: fx.Graph) -> list[fx.Node]:
    """All marker nodes of a graph, in order."""
    return find_nodes(graph, is_marker)


def marks_gradient(marker: fx.Node) -> bool:
    """True if a marker marks a gradient, False if it marks buffers."""
    return is_operator(marker.target, "graphopt::reduce_gradient")


def group_of(marker: fx.Node) -> Group:
    """The process group over which a marker shares its values."""
    ranks, name = marker.args[2:4]
    return Group(cast(str, name), cast(int, ranks))


def forget_unread(graph: fx.Graph) -> None:
    """Drops buffers that nobody reads from the markers of buffers."""
    for marker in markers_of(graph):
        if marks_gradient(marker):
            continue
        buffers, names, *group = cast(tuple[Any, ...], marker.args)
        read = sorted({cast(int, item.args[1]) for item in marker.users})
        if not read:
            graph.erase_node(marker)
        elif len(read) < len(buffers):
            chosen = [[given[index] for index in read] for given in (buffers, names)]
            with graph.inserting_before(marker):
                fewer = call_function_with_meta(
                    graph, cast(Any, marker.target), (*chosen, *group), like=marker
                )
            for item in list(marker.users):
                item.args = fewer, read.index(cast(int, item.args[1]))
            graph.erase_node(marker)


@dataclass(frozen=True)
class Nodes:
    """Makes nodes before a node, such as a marker, with its source line and module path.

    Attributes:
        place: the node.
        phase: of the new nodes; None: that of `place`.
    """

    place: fx.Node
    phase: str | None = None

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Inserts a call of an operator; returns its node, or the items of several results."""
        made = self._made(target, args, kwargs)
        value = fake_value(made)
        if isinstance(value, torch.Tensor):
            return made
        return [self._made(operator.getitem, (made, index), {}) for index in range(len(value))]

    def _made(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        graph = self.place.graph
        with graph.inserting_before(self.place):
            made = call_function_with_meta(graph, target, args, kwargs, like=self.place)
        if self.phase is not None:
            set_phase(made, self.phase)
        _compat.renamed(made, target.__name__.partition(".")[0])  # as a trace names it
        return made


def replace_marker(marker: fx.Node, by: fx.Node | Sequence[fx.Node]) -> None:
    """Replaces a marker's results by other nodes, and removes the marker.

    Args:
        by: one node for the gradient, or one for each buffer.
    """
    if isinstance(by, fx.Node):
        marker.replace_all_uses_with(by)
    else:
        for item in list(marker.users):
            item.replace_all_uses_with(by[cast(int, item.args[1])])
            marker.graph.erase_node(item)
    marker.graph.erase_node(marker)
