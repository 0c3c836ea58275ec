"""Divide optimizers so that the updates for some gradients stand apart from the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import fx

from graphopt.graph_utils import get_output, is_operator
from graphopt.optim.blocks import (
    FUSED_ADAM,
    FusedAdamBlock,
    FusedOptimizerBlock,
    ListOptimizerBlock,
)
from graphopt.optim.components import NONE
from graphopt.optim.division import Division, refuse_late
from graphopt.optim.lists import OptimizerSplitError
from graphopt.optim.outputs import ForeachAddBlock


def split_updates(
    gm: fx.GraphModule, gradient_sets: Sequence[Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    """Give each set of gradients updates of its own, and return their nodes.

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
    division = Division(gm.graph, gradient_sets)
    division.apply()
    updates: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        owner = NONE if node.op == "output" else division.set_of(node)
        if owner != NONE:
            updates.setdefault(owner, []).append(node)
    roots = [division.components.root(index) for index in range(len(gradient_sets))]
    return [updates.setdefault(root, []) for root in roots]


def split_fused_optimizer(
    gm: fx.GraphModule,
    block: FusedOptimizerBlock,
    split_gradients: Iterable[fx.Node] | Sequence[Iterable[fx.Node]],
) -> tuple[FusedOptimizerBlock, ...]:
    """Replace an optimizer by several, each for some of its gradients. Bitwise.

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
    division = Division(gm.graph, sets, only=set(block.nodes))
    _check_separate(division, block, sets)
    division.apply()
    copies = _renew(gm.graph, block.copies)
    return tuple(
        _part(block, division, copies, index, gradients) for index, gradients in enumerate(sets)
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
    refuse_late(graph, (*block.nodes, *block.copies))


def _check_separate(
    division: Division, block: FusedOptimizerBlock, sets: Sequence[Sequence[fx.Node]]
) -> None:
    components = division.components
    for where in components.meetings.values():
        raise OptimizerSplitError(
            "the updates depend on gradients of several sets, as with clipping by the norm of all"
            f"\n  > {where.format_node()}"
        )
    for node in block.nodes:
        if node not in division.elements.lists:
            raise OptimizerSplitError(
                f"the results of %{node.name} are not read entry by entry\n  > {node.format_node()}"
            )
        if NONE in division.entries(node):
            raise OptimizerSplitError(
                f"an entry of %{node.name} does not belong to the gradients of one set: several"
                f" need it, or something outside of the optimizer\n  > {node.format_node()}"
            )


def _renew(graph: fx.Graph, copies: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Put new copies in the places of old ones, in the output as well."""
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
    division: Division,
    copies: dict[fx.Node, fx.Node],
    index: int,
    gradients: Sequence[fx.Node],
) -> FusedOptimizerBlock:
    """The block of one set after the division."""
    nodes = {node: part for node in block.nodes if (part := _part_of(division, node, index))}
    step = block.step
    count = nodes.get(step.add_node) if step else None
    new_step = None if count is None else ForeachAddBlock.from_node(count)
    optim_nodes = [nodes[node] for node in block.optim.nodes if node in nodes]
    if is_operator(optim_nodes[-1].target, *FUSED_ADAM):
        return FusedOptimizerBlock(new_step, FusedAdamBlock.from_node(optim_nodes[-1]))
    owned = [
        copies[copy]
        for copy in block.optim.copies
        if division.components.set_of(division.elements.number[copy]) == index
    ]
    chosen = set(gradients)
    grads = [gradient for gradient in block.optim.grads if gradient in chosen]
    return FusedOptimizerBlock(new_step, ListOptimizerBlock(optim_nodes, grads, owned))


def _part_of(division: Division, node: fx.Node, index: int) -> fx.Node | None:
    """The call that a list operator became for one set: itself, if it was that set's alone."""
    if node in division.parts:
        return division.parts[node].get(index)
    return node if division.components.set_of(division.elements.number[node]) == index else None
