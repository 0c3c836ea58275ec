"""The search for the optimizers of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from networkx.utils import UnionFind
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_copy, is_list_operator, is_operator
from graphopt.ir.entries import list_call
from graphopt.ir.metadata import known_value, phase_of
from graphopt.ir.operators import is_fused_optimizer
from graphopt.optim.blocks import (
    FUSED_ADAM,
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
    copy_of,
    entries_of,
    find_outputs,
)
from graphopt.optim.elements import Elements, Origin
from graphopt.optim.errors import OptimizerSplitError

MAX_STEP_DISTANCE = 5
"""The most nodes between a fused optimizer and its step counter."""


def get_fused_optimizer_block(node: fx.Node) -> FusedOptimizerBlock:
    """Returns the optimizer that a list operator belongs to.

    Args:
        node: a fused optimizer, or one of the `_foreach_*` of an optimizer.

    Raises:
        OptimizerSplitError: it belongs to none, or its step counter cannot be found.

    >>> node = next(n for n in gm.graph.nodes if "fused_adam" in str(n.target))
    >>> graphopt.optim.get_fused_optimizer_block(node).optim.optim_node is node
    True
    """
    if is_fused_optimizer(node):
        return _fused_block(node)
    for block in _all_blocks(node.graph):
        if node in block.nodes:
            return block
    raise OptimizerSplitError(f"%{node.name} is not part of an optimizer: {node.format_node()}")


def get_all_fused_optimizer_blocks(gm: fx.GraphModule) -> list[FusedOptimizerBlock]:
    """Returns all optimizers made of list operators, in graph order and linear time.

    Raises:
        OptimizerSplitError: the step counter of one cannot be found.

    >>> [block.optim.optim_node for block in graphopt.optim.get_all_fused_optimizer_blocks(gm)]
    [_fused_adam]
    """
    return sorted(_all_blocks(gm.graph), key=lambda block: block.optim.optim_node)


def _all_blocks(graph: fx.Graph) -> list[FusedOptimizerBlock]:
    fused = [_fused_block(node) for node in graph.nodes if is_fused_optimizer(node)]
    return [*fused, *_foreach_blocks(graph)]


def _fused_block(node: fx.Node) -> FusedOptimizerBlock:
    steps = entries_of(node, "state_steps")
    step = ForeachAddBlock.from_node(_step_counter(node, steps)) if steps else None
    if is_operator(node.target, *FUSED_ADAM):
        return FusedOptimizerBlock(step, FusedAdamBlock.from_node(node))
    call = list_call(node)
    items = [item for c in call.containers() for item in c.users] if call else []
    copies = [copy for item in items if (copy := copy_of(item)) is not None]
    grads = entries_of(node, "grads")
    return FusedOptimizerBlock(step, ListOptimizerBlock([node], grads, copies))


def _step_counter(node: fx.Node, steps: Sequence[fx.Node]) -> fx.Node:
    """Returns the operator that increments the step counts which an optimizer reads."""
    level = [steps[0]]
    for _ in range(MAX_STEP_DISTANCE):
        found = next((n for n in level if is_operator(n.target, "aten::_foreach_add")), None)
        if found is not None:
            return found
        level = [source for n in level for source in n.all_input_nodes]
    raise OptimizerSplitError(
        f"no _foreach_add within {MAX_STEP_DISTANCE} nodes before the step counts of"
        f" %{node.name}\n  > {node.format_node()}"
    )


def _foreach_blocks(graph: fx.Graph) -> Iterator[FusedOptimizerBlock]:
    """Yields the optimizers that consist of several dependent `_foreach_*` operators."""
    slices = _slices(graph)
    if not slices:
        return
    elements = Elements(graph)
    for nodes in slices:
        inside = set(nodes)
        lists = [node for node in nodes if is_list_operator(node)]
        grads = list(dict.fromkeys(_gradients(elements, nodes, inside)))
        copies = [node for node in nodes if is_copy(node)]
        if not grads or not copies:
            continue
        counter = next((node for node in lists if _counts_steps(node)), None)
        step = None if counter is None else ForeachAddBlock.from_node(counter)
        counts = set(step.copies) if step else set()
        optim = ListOptimizerBlock(
            [node for node in lists if node is not counter],
            grads,
            [node for node in copies if node not in counts],
        )
        yield FusedOptimizerBlock(step, optim)


def _slices(graph: fx.Graph) -> list[list[fx.Node]]:
    """Returns the connected sets of `_foreach_*` operators and their dependents, in graph order."""
    found = UnionFind()
    for node in graph.nodes:
        if phase_of(node) not in ("optimizer", None) or node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source in found.parents]
        if not is_fused_optimizer(node) and (sources or is_list_operator(node)):
            found.union(node, *sources)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in found.parents:
        members.setdefault(found[node], []).append(node)
    return list(members.values())


def _gradients(
    elements: Elements, nodes: Sequence[fx.Node], inside: set[fx.Node]
) -> Iterator[fx.Node]:
    for node in nodes:
        for source in node.all_input_nodes:
            if source in inside:
                continue
            if elements.origins[elements.number[source]] is Origin.DATA:
                yield source


def _counts_steps(node: fx.Node) -> bool:
    """True if a `_foreach_add` adds one number to zero-dimensional state and stores the sums."""
    if not is_operator(node.target, "aten::_foreach_add"):
        return False
    assert isinstance(node.target, _compat.OpOverload)
    entries = entries_of(node, "self")
    if _compat.overload_name(node.target) not in ("Scalar", "Tensor") or not entries:
        return False
    values = [known_value(entry) for entry in entries]
    if not all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in values):
        return False
    stored = zip(entries, find_outputs(node, 0, entries), strict=True)
    return all(copy is None or copy.args[0] is entry for entry, copy in stored)
