"""Selection of the nodes that Inductor may compile, by their place in the graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import (
    follows_output_convention,
    get_outputs,
    is_operator,
    is_view,
    may_alias,
    readers_through_views,
    same_kind,
    tensors_in,
    written,
)
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import is_fused_optimizer, is_item
from graphopt.lowering.lowerable import NodePredicate, is_free, reason_to_keep, unsuitable_tensor
from graphopt.lowering.updates import stored_by, updated

_NO_COPIES = (
    "aten::_fused_rms_norm",
    "aten::_fused_rms_norm_backward",
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::embedding",
    "aten::mm",
    "aten::_native_batch_norm_legit_functional",
    "aten::native_batch_norm_backward",
    "aten::native_group_norm",
    "aten::native_group_norm_backward",
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
)
"""Operators that read parameters and that no rewrite takes for a copy."""

_COPIES_OF_THE_SAME_SHAPE = ("aten::add", "aten::div", "aten::mul", "aten::sub")
"""Operators that are taken for a copy where their other operand is all zeros or all ones, but not
where that gives the result another shape."""

_ITEM = torch.ops.aten._local_scalar_dense.default


def reasons_to_keep(
    graph: fx.Graph, node_predicate: NodePredicate | None, random: bool
) -> dict[fx.Node, str | None]:
    """Returns for each call the reason against compiling it, or None."""
    known: dict[fx.Node, str | None] = {}
    updates = set(get_outputs(graph).updates) if follows_output_convention(graph) else set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_item(node) and isinstance(node.args[0], fx.Node):
            reason = known.get(node.args[0], "it is an item of an input")
        else:
            reason = None
            if node not in updates or not _updates_whole(node):
                reason = reason_to_keep(node, random=random)
            reason = reason or _whole_list(node)
            if reason is None and node_predicate is not None and not node_predicate(node):
                reason = "node_predicate refused it"
        known[node] = reason
    _keep_numbers(graph, known)
    return known


def _keep_numbers(graph: fx.Graph, reasons: dict[fx.Node, str | None]) -> None:
    """Keeps single-number nodes, such as step counts of an optimizer, whose value Python reads:
    a compiled region would end before all that reads them."""
    for node in graph.nodes:
        if node.target is _ITEM:
            for source in _single_numbers(node):
                if reasons.get(source, "") is None:
                    reasons[source] = "Python reads it as a number"


def _single_numbers(node: fx.Node) -> set[fx.Node]:
    """Returns all nodes that a node is computed from if each is a single number, else nothing."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if any(tensor.dim() for tensor in tensors_in(known_value(source))):
            return set()
        if source not in found:
            found.add(source)
            pending += source.all_input_nodes
    return found


def _whole_list(node: fx.Node) -> str | None:
    """Returns the reason against a node whose list of results is used whole, or None."""
    if isinstance(fake_value(node), (list, tuple)) and not all(map(is_item, node.users)):
        return "its results are used as a whole list"
    if any(isinstance(known_value(source), (list, tuple)) for source in node.all_input_nodes):
        return "it takes a whole list of results"
    return None


def _updates_whole(node: fx.Node) -> bool:
    """True if a state update replaces a whole input by a value of the same shape and dtype."""
    if not is_operator(node.target, "aten::copy_") or len(node.all_input_nodes) != 2:
        return False
    state, value = node.all_input_nodes
    if state.op != "placeholder" or node.args[0] is not state or not same_kind(state, value):
        return False
    return unsuitable_tensor(fake_value(value)) is None


def keep_updates(graph: fx.Graph, effects: Effects, reasons: dict[fx.Node, str | None]) -> None:
    """Keeps state updates that compiled code would do after a read of the old value, or of
    aliased state."""
    reached = {
        effects.key(node)
        for node, reason in reasons.items()
        if reason is not None and list(tensors_in(known_value(node)))
    }
    states: Counter[Any] = Counter(
        effects.key(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")
    )
    for node, reason in reasons.items():
        if reason is not None or not written(node):
            continue
        key, (state,) = effects.key(node), written(node)
        if key in reached or states[key] > 1:
            reasons[node] = "its state is also reached through other values"
        elif effects.old_read_after(state, node):
            reasons[node] = "its state is read afterwards, and not as its result"
    for node, reason in reasons.items():
        if reason is None and is_fused_optimizer(node):
            reasons[node] = _reason_to_keep_fused(node, effects, reasons)
    for node in reasons:
        if is_item(node) and reasons[node] is None:
            reasons[node] = reasons.get(node.args[0])  # type: ignore[arg-type]


def _reason_to_keep_fused(
    node: fx.Node, effects: Effects, reasons: dict[fx.Node, str | None]
) -> str | None:
    """Returns the reason against compiling a fused optimizer, which updates in place.

    Inductor takes a graph for functional, and may read what a copy is made of in the place of the
    copy. So nobody may read what is updated but operators that are no copies, and these before.
    """
    copies = stored_by(node)
    for state in updated(node):
        copy = copies.get(state)
        if copy is None or reasons[copy] is not None:
            return "what it updates is not all state that compiled code may write"
        if effects.old_read_after(state, node):
            return "a parameter or state is read afterwards, and not as its result"
        for reader in readers_through_views(state):
            if reader not in (node, copy) and _may_be_copy(reader, state, effects):
                return f"{reader.target} reads a parameter or state"
        results = copy.args[1].users  # type: ignore[union-attr]
        if any(user is not copy and user.op != "output" for user in (*results, *copy.users)):
            return "what it updates is read again"
    return None


def _may_be_copy(reader: fx.Node, state: fx.Node, effects: Effects) -> bool:
    if is_operator(reader.target, *_COPIES_OF_THE_SAME_SHAPE):
        shape, key = fake_value(reader).shape, effects.key(state)
        return any(
            fake_value(source).shape == shape
            for source in reader.all_input_nodes
            if effects.key(source) == key
        )
    return not may_alias(reader) and not is_operator(reader.target, *_NO_COPIES)


def free_nodes(
    graph: fx.Graph, effects: Effects, reasons: dict[fx.Node, str | None]
) -> set[fx.Node]:
    """Nodes that each region computes for itself: constants, and views of uncompiled values."""
    free: set[fx.Node] = set()
    changed = {effects.key(state) for node in graph.nodes for state in written(node)}

    def stays(node: fx.Node) -> bool:
        return node in free or node not in reasons or reasons[node] is not None

    for node in graph.nodes:
        if reasons.get(node, "") is not None or not is_free(node, stays):
            continue
        if is_view(node) or effects.key(node) not in changed:  # a constant that nobody fills in
            free.add(node)
    return free
