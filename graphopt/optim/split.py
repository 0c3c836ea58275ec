"""Splitting of optimizers, so that some gradients' updates are separate from the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import fx

from graphopt.graph_utils import get_output
from graphopt.ir.entries import divide
from graphopt.iter_graph import IterGraph
from graphopt.optim.blocks import (
    ForeachAddBlock,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
)
from graphopt.optim.descendants import Descendants
from graphopt.optim.elements import NONE, Elements
from graphopt.optim.errors import OptimizerSplitError

Parts = dict[fx.Node, dict[int, list[fx.Node]]]
"""For each list operator and owner: the new call, followed by the nodes that hold its results."""


def split_updates(
    gm: fx.GraphModule, gradient_sets: Sequence[Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """Splits updates so that each set of gradients has its own, and returns their nodes.

    Fused, foreach and plain optimizers, also several of them. The list operators on the way are
    divided; entries that belong to no set stay together. Bitwise, since entries are independent.

    Args:
        gm: its graph is changed. In the captured dialect, or with functional list operators.
        gradient_sets: disjoint sets of nodes that hold reduced gradients.

    Returns:
        Per set, in graph order, all nodes that depend on its gradients, what is computed from state
        for them alone (step counters, decayed moments), and the `copy_` of all these. Values
        computed from hyperparameters alone belong to no set. Sets whose updates depend on one
        another, as with clipping by the norm of all gradients, get one and the same list.

    Raises:
        OptimizerSplitError: a set holds what is no node of the graph, sets overlap, an operator on
            the way works in place, or an operator to divide runs late. Nothing is changed.

    >>> from graphopt.optim import gradients_of, split_updates
    >>> len(gradients_of(gm))
    2
    """
    found = Descendants(gm.graph, gradient_sets)
    updates = separate(gm.graph, found.elements, found.owners)
    return [updates.setdefault(found.root(index), []) for index in range(len(gradient_sets))]


def separate(
    graph: fx.Graph, elements: Elements, owners: Sequence[int]
) -> dict[int, list[fx.Node]]:
    """Splits exactly the list operators whose entries have several owners.

    Args:
        elements: of the graph as it is.
        owners: of each element, or `NONE`.

    Returns:
        By owner the nodes of its elements, in graph order.

    Raises:
        OptimizerSplitError: an operator to divide runs late. Nothing is changed.
    """
    parts = _divide(graph, elements, owners, elements.lists)
    by_part = [pair for by_owner in parts.values() for pair in by_owner.items()]
    new = {node: owner for owner, nodes in by_part for node in nodes}
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output":
            owner = new[node] if node in new else owners[elements.number[node]]
            found.setdefault(owner, []).append(node)
    return found


def split_fused_optimizer(
    gm: fx.GraphModule,
    block: FusedOptimizerBlock,
    split_gradients: Iterable[fx.Node] | Sequence[Iterable[fx.Node]],
) -> tuple[FusedOptimizerBlock, ...]:
    """Splits an optimizer into several, each for a set of gradients, bit for bit the same.

    Args:
        gm: its graph is changed.
        block: an optimizer of this graph. Its divided list operators and its copies leave it.
        split_gradients: gradients of the block, or a list of n disjoint sets of them.

    Returns:
        The optimizer of the given gradients and that of the rest; of n sets and that of the rest.
        Each keeps the order that its entries had.

    Raises:
        OptimizerSplitError: no gradients are given or left, the block does not have one, one is
            given twice, or their updates depend on one another. Nothing is changed.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> first = [block.optim.optim_args.grads[0]]
    >>> halves = graphopt.optim.split_fused_optimizer(gm, block, first)
    >>> [len(half.optim.optim_args.grads) for half in halves]
    [1, 1]
    """
    _check_present(gm.graph, block)
    sets = _gradient_sets(block, split_gradients)
    found = Descendants(gm.graph, sets)
    _check_separate(found, block)
    owner = {copy: found.owners[found.elements.number[copy]] for copy in block.optim.copies}
    divided = _divide(gm.graph, found.elements, found.owners, block.nodes)
    copies = _replace_copies(gm.graph, block.copies)
    blocks: list[FusedOptimizerBlock] = []
    for index, gradients in enumerate(sets):
        parts = {node: by_set[index][0] for node, by_set in divided.items() if index in by_set}
        stored = [copies[copy] for copy in block.optim.copies if owner[copy] == index]
        blocks.append(_part(block, parts, set(gradients), stored))
    return tuple(blocks)


def _divide(
    graph: fx.Graph, elements: Elements, owners: Sequence[int], nodes: Iterable[fx.Node]
) -> Parts:
    """Splits those of some list operators whose entries have several owners."""
    groups = {node: elements.groups(node, owners) for node in nodes}
    _refuse_late(graph, (node for node, by_owner in groups.items() if len(by_owner) > 1))
    parts: Parts = {}
    for node, by_owner in groups.items():
        items = list(by_owner.values())
        new = divide(elements.lists[node], items) if len(items) > 1 else [[node]]
        parts[node] = dict(zip(by_owner, new, strict=True))
    return parts


def _refuse_late(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Refuses to replace late nodes and their destinations."""
    if not isinstance(graph, IterGraph):
        return
    destinations = set(graph.late.values())
    for node in nodes:
        if graph.is_late(node):
            raise OptimizerSplitError(
                f"%{node.name} runs one iteration late: split the optimizer before it is moved"
            )
        if node in destinations:
            raise OptimizerSplitError(
                f"late nodes run before %{node.name}: split the optimizer before they are moved"
            )


def _gradient_sets(block: FusedOptimizerBlock, split_gradients: Any) -> list[list[fx.Node]]:
    given = list(split_gradients)
    if not given:
        raise OptimizerSplitError("no gradients to split off were given")
    one_set = any(isinstance(entry, fx.Node) for entry in given)
    sets = [given] if one_set else [list(entry) for entry in given]
    grads = dict.fromkeys(block.optim.grads)
    seen: set[fx.Node] = set()
    for gradients in sets:
        if not gradients:
            raise OptimizerSplitError("one of the sets of gradients is empty")
        for gradient in gradients:
            if not isinstance(gradient, fx.Node) or gradient not in grads:
                raise OptimizerSplitError(
                    f"{gradient} is not a gradient of %{block.optim.optim_node.name}"
                )
            if gradient in seen:
                raise OptimizerSplitError(f"gradient %{gradient.name} is given twice")
            seen.add(gradient)
    rest = [gradient for gradient in grads if gradient not in seen]
    if not rest:
        raise OptimizerSplitError(
            "all gradients of the optimizer are given, so that none is left for the rest"
        )
    return [*sets, rest]


def _check_present(graph: fx.Graph, block: FusedOptimizerBlock) -> None:
    present = set(graph.nodes)
    for node in (*block.nodes, *block.copies):
        if node not in present:
            raise OptimizerSplitError(f"%{node.name} of the block is not in this graph any more")
    _refuse_late(graph, (*block.nodes, *block.copies))


def _check_separate(found: Descendants, block: FusedOptimizerBlock) -> None:
    for where in found.meetings:
        raise OptimizerSplitError(
            "the updates depend on gradients of several sets, as with clipping by the norm of all"
            f"\n  > {where.format_node()}"
        )
    for node in block.nodes:
        if node not in found.elements.lists:
            raise OptimizerSplitError(
                f"the results of %{node.name} are not read entry by entry\n  > {node.format_node()}"
            )
        if NONE in found.elements.groups(node, found.owners):
            raise OptimizerSplitError(
                f"an entry of %{node.name} does not belong to the gradients of one set: several"
                f" need it, or something outside of the optimizer\n  > {node.format_node()}"
            )


def _replace_copies(graph: fx.Graph, copies: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Replaces copies by new ones at the same places, also in the output."""
    new: dict[fx.Node, fx.Node] = {}
    for copy in copies:
        with graph.inserting_before(copy):
            new[copy] = graph.call_function(cast(Any, copy.target), copy.args, copy.kwargs)
        new[copy].meta = dict(copy.meta)
        for user in list(copy.users):
            if user.op != "output":
                user.replace_input_with(copy, new[copy])
    output = get_output(graph)
    # All at once: the output may be as long as the list of copies.
    output.args = fx.node.map_arg(output.args, lambda node: new.get(node, node))
    for copy in copies:
        graph.erase_node(copy)
    return new


def _part(
    block: FusedOptimizerBlock,
    parts: dict[fx.Node, fx.Node],
    gradients: set[fx.Node],
    copies: list[fx.Node],
) -> FusedOptimizerBlock:
    """Returns the block of one gradient set after a split. `parts`: the calls that replaced the
    block's, or that belonged to the set alone."""
    counter = parts.get(block.step.add_node) if block.step else None
    step = None if counter is None else ForeachAddBlock.from_node(counter)
    nodes = [parts[node] for node in block.optim.nodes if node in parts]
    if isinstance(block.optim, FusedAdamBlock):
        return FusedOptimizerBlock(step, FusedAdamBlock.from_node(nodes[-1]))
    grads = [gradient for gradient in block.optim.grads if gradient in gradients]
    return FusedOptimizerBlock(step, ListOptimizerBlock(nodes, grads, copies))
