"""Node insertion for buckets of any kind of collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphopt.comm.blocks import CommBlock
from graphopt.comm.buckets import ScaledOperand, communicating, scaled_input
from graphopt.graph_utils import is_collective
from graphopt.ir.metadata import fake_value, sent_names, set_sent_names

aten = torch.ops.aten


def first_reader(last: fx.Node, first_wait: fx.Node, overtaken: set[fx.Node]) -> fx.Node:
    """Returns the place for a fused wait: before the first old wait, and after `last` and later
    launches that need no member."""
    if last < first_wait:
        return first_wait
    node = last.next
    while is_collective(node) and overtaken.isdisjoint(node.all_input_nodes):
        node = node.next
    return node


def flat_members(
    graph: fx.Graph, blocks: Sequence[CommBlock]
) -> tuple[list[fx.Node], float | None]:
    """Returns all members' operands as 1-D tensors, and their common constant factor or None."""
    scaled = [scaled_input(block.inputs[0]) for block in blocks]
    factors = {None if entry is None else entry.factor for entry in scaled}
    if len(factors) == 1 and None not in factors:
        return [
            flat(graph, _unscaled(graph, entry, block.comm_node), block.comm_node)
            for entry, block in zip(scaled, blocks, strict=True)
            if entry is not None
        ], factors.pop()
    return [flat(graph, block.inputs[0], block.comm_node) for block in blocks], None


def _unscaled(graph: fx.Graph, scaled: ScaledOperand, like: fx.Node) -> fx.Node:
    node = scaled.tensor
    if not scaled.views and not fake_value(node).is_contiguous():
        options = {"memory_format": torch.contiguous_format}
        return communicating(graph, aten.clone.default, (node,), like, options)
    for view in scaled.views:
        node = communicating(graph, view.target, (node, *view.args[1:]), like)
    return node


def flat(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """Flattens a contiguous tensor to one dimension."""
    value = fake_value(node)
    if value.dim() == 1:
        return node
    return communicating(graph, aten.view.default, (node, [value.numel()]), like)


def copy_out(graph: fx.Graph, result: fx.Node, wait: fx.Node) -> fx.Node:
    """Copies `result` just before the first node that reads `wait`."""
    with graph.inserting_before(min(wait.users)):
        return communicating(graph, aten.clone.default, (result,), result)


def copy_sent_names(blocks: Sequence[CommBlock], launch: fx.Node) -> None:
    """Copies the members' names of sent parameters to a fused collective and its wait."""
    names = [name for block in blocks for name in sent_names(block.comm_node)]
    for node in (launch, *launch.users):
        set_sent_names(node, names)
