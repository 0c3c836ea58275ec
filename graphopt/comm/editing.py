"""Edits of collectives: replacing one, and finding the gradients and parameters it serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphopt.comm.blocks import CommBlock, located
from graphopt.errors import VerificationError
from graphopt.graph_utils import is_collective, is_wait
from graphopt.ir.metadata import known_value, sent_names, set_sent_names


def updates_of(gm: fx.GraphModule, block: CommBlock) -> list[fx.Node]:
    """Returns the optimizer nodes for a collective's gradients, in graph order: all that depends on
    them, state used for them alone, and its `copy_`.

    List operators are divided (`graphopt.optim.split_updates`), so that the nodes can be moved
    apart from the updates for other gradients. With clipping by the norm of all gradients, the
    nodes are those of all updates.

    Args:
        gm: its graph is changed.

    Raises:
        OptimizerSplitError: an operator on the way works in place or runs late. Nothing is changed.

    >>> block = graphopt.comm.get_all_comm_blocks(gm, "all_reduce")[0]
    >>> [n.args[0].meta["fqn"] for n in graphopt.comm.updates_of(gm, block)
    ...  if graphopt.graph_utils.is_copy(n)]
    ['bias']
    """
    # This module is below `graphopt.optim`.
    from graphopt.optim import split_updates

    return split_updates(gm, [block.outputs])[0]


def replace_collective(
    gm: fx.GraphModule, block: CommBlock, new_output: fx.Node | Sequence[fx.Node]
) -> None:
    """Redirects the readers of a collective's result to `new_output`, and removes the collective.

    Launch, waits and what stands between them go, so that nothing is sent twice. The names of the
    parameters that were sent go over to the collectives that `new_output` is computed from.

    Args:
        block: the collective to take out.
        new_output: what its wait gave, computed another way: of the same shape, dtype and device.
            One node for each wait, where there are several.

    Raises:
        VerificationError: `new_output` is another kind of tensor, or is computed from the
            collective that is to go. Nothing is changed.

    >>> from graphopt.graph_utils import call_function_with_meta as call
    >>> block = graphopt.comm.get_all_comm_blocks(gm, "all_reduce")[0]
    >>> with gm.graph.inserting_before(block.wait_nodes[0]):
    ...     args = (block.inputs[0], *block.comm_node.args[1:])
    ...     launch = call(gm.graph, block.comm_node.target, args)
    ...     wait = call(gm.graph, block.wait_nodes[0].target, (launch,))
    >>> graphopt.comm.replace_collective(gm, block, wait)
    >>> block.comm_node in gm.graph.nodes, graphopt.comm.get_comm_block(launch).outputs == [wait]
    (False, True)
    """
    new = [new_output] if isinstance(new_output, fx.Node) else list(new_output)
    if len(new) != len(block.wait_nodes):
        raise VerificationError(
            f"collective %{block.comm_node.name} has {len(block.wait_nodes)} waits, and"
            f" {len(new)} new outputs are given\n{located(block.comm_node)}"
        )
    for wait, node in zip(block.wait_nodes, new, strict=True):
        _refuse_other_kind(wait, node)
        _refuse_dependent(block.comm_node, node)
    _name_what_is_sent(block.comm_node, new)
    for wait, node in zip(block.wait_nodes, new, strict=True):
        wait.replace_all_uses_with(node)
    for member in sorted(block.node_list, reverse=True):
        if not member.users:
            gm.graph.erase_node(member)


def _refuse_other_kind(wait: fx.Node, new: fx.Node) -> None:
    was, now = known_value(wait), known_value(new)
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return
    kinds = [(t.dtype, list(t.shape), str(t.device)) for t in (now, was)]
    if kinds[0] != kinds[1]:
        texts = [f"{dtype} of shape {shape} on {device}" for dtype, shape, device in kinds]
        raise VerificationError(
            f"%{new.name} is {texts[0]}, and cannot stand for %{wait.name}, which is {texts[1]}\n"
            f"{located(new)}\n  hint:  {_conversion(was, now)}"
        )


def _conversion(was: torch.Tensor, now: torch.Tensor) -> str:
    """Describes how to convert one kind of tensor to another."""
    if was.numel() != now.numel():
        return (
            f"readers need all {was.numel()} elements, and these are {now.numel()}: join the parts"
            " with aten.cat, and what it gives with aten.view"
        )
    if was.dtype != now.dtype:
        return f"convert it back: aten._to_copy(new_output, dtype={was.dtype})"
    return "convert it back, as with aten.view or, between devices, aten._to_copy"


def _refuse_dependent(launch: fx.Node, new: fx.Node) -> None:
    if launch in _computed_from(new, launch):
        raise VerificationError(
            f"%{new.name} is computed from %{launch.name}, the collective that it is to replace\n"
            f"{located(new)}\n"
            "  hint:  compute it from block.inputs; to change what readers of a collective get,"
            " use wait.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)"
        )


def _computed_from(node: fx.Node, end: fx.Node) -> set[fx.Node]:
    """Returns the nodes between `end` and a node, this one included."""
    found: set[fx.Node] = {node}
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found and source >= end:
                found.add(source)
                pending.append(source)
    return found


def _name_what_is_sent(launch: fx.Node, outputs: Sequence[fx.Node]) -> None:
    names = sent_names(launch)
    for output in outputs:
        for node in _computed_from(output, launch.all_input_nodes[0]):
            if (is_collective(node) or is_wait(node)) and not sent_names(node):
                set_sent_names(node, names)
