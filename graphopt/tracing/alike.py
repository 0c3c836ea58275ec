"""Which values of a traced step are the same on all ranks: those computed from parameters,
optimizer state and what collectives of all ranks have given, and from nothing of a rank's own.

    x ── local ──▶ loss ── backward ──▶ g ── all_reduce ──▶ mean of all ranks ── norm ──▶ alike

A decision by such a value is the same decision everywhere. Batches, buffers and random numbers are
a rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_copy, is_operator
from graphopt.ir.operators import draws, is_marker, operator_of

ALIKE = frozenset({"parameter", "optimizer_state"})
"""Kinds of inputs that all ranks have alike."""


def is_alike(graph: fx.Graph, wanted: fx.Node, kinds: Sequence[str]) -> bool:
    """Whether a node of a trace that is being recorded has the same value on all ranks.

    Args:
        kinds: of the placeholders, in order.
    """
    own: set[Any] = set()
    order = iter(kinds)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(order) not in ALIKE:
                own |= _marks(node)
        elif node.op == "call_function":
            _note(node, own)
        if node is wanted:
            break
    return wanted not in own


def _note(node: fx.Node, own: set[Any]) -> None:
    """Add a node, and what it writes to, to what is a rank's own; or take them out of it."""
    if is_collective(node) or is_marker(node):
        if not _of_all(node):
            own |= _marks(node)
        return
    if is_copy(node) and _overwrites_all(node):
        destination, source = cast(tuple[fx.Node, fx.Node], node.args[:2])
        if own.isdisjoint(_marks(source)):
            own -= _marks(node) | _marks(destination)
            return
    if is_operator(node.target, "aten::_amp_foreach_non_finite_check_and_unscale_"):
        _note_check(node, own)
        return
    local = draws(node) or any(not own.isdisjoint(_marks(arg)) for arg in node.all_input_nodes)
    if not local:
        return
    own |= _marks(node)
    for arg in _written(node):
        own |= _marks(arg)


def _note_check(node: fx.Node, own: set[Any]) -> None:
    """Gradients are scaled, and it is noted whether all of them are finite, which does not depend
    on the scale."""
    gradients, found, scale = cast(tuple[list[fx.Node], fx.Node, fx.Node], node.args)
    if any(not own.isdisjoint(_marks(gradient)) for gradient in gradients):
        own |= _marks(found)
    if not own.isdisjoint(_marks(scale)):
        own.update(*map(_marks, gradients))


def _overwrites_all(copy: fx.Node) -> bool:
    """Whether nothing is left of what the memory of the destination held, as behind
    `torch.distributed.all_reduce` of a whole tensor."""
    value = copy.meta.get("val")
    if not isinstance(value, torch.Tensor) or _compat.has_symbolic_shape(value):
        return False
    return bool(value.untyped_storage().nbytes() == value.nbytes)


def _of_all(node: fx.Node) -> bool:
    """Whether a collective, or what a marker stands for, gives all ranks the same."""
    if not operator_of(node).same_on_all and not is_marker(node):
        return False
    group = _compat.group_named(str(node.args[-1]))
    return group is not None and group.size() == dist.get_world_size()


def _marks(node: fx.Node) -> set[Any]:
    """A node, and the memory in which its value lies."""
    leaves = _compat.tree_leaves(node.meta.get("val"))
    storages = {_compat.storage_key(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {node, *storages}


def _written(node: fx.Node) -> Iterable[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, _compat.OpOverload):
        return
    for position, argument in enumerate(_compat.schema_of(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else None
        given = node.kwargs.get(argument.name, given)
        yield from (leaf for leaf in _compat.tree_leaves(given) if isinstance(leaf, fx.Node))
