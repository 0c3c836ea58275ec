"""Wait for gradients and update parameters in the next iteration.

    mm = mm(x, w)                            add' = add(w, wait(bucket'), -lr')   of the last step
    g = …                                    w' = copy_(w, add')
    bucket = all_reduce(g)            ==>    mm = mm(x, w')
    add = add(w, wait(bucket), -lr)          g = …
    copy_(w, add)                            bucket = all_reduce(g)      still under way at the end

The wait of a bucket and the update of its parameters move to just before the first read of these
parameters in the next iteration. The collective then has the end of the step, whatever the program
does between two steps, and the beginning of the next forward to finish.

Which buckets move. Collectives of a group finish in the order in which they were launched. So a
step that waits for one of them has waited for all before it, and moving those gains nothing: what
moves is the longest run of buckets, counted from the last one launched, that can move at all. A
bucket can move if nobody needs its gradients or the new parameters in this iteration: the step
returns none of them, clears `.grad` before it ends, and nobody holds the parameters in ways in
which their use would not be seen (`graphopt.runtime.late.tensors`).

Where to. A bucket goes before the first read of its parameters, or of those of a bucket launched
after it, whichever comes first: work that is ready must not stand behind a wait that is not.

In which order. With `held_back`, a share of the buckets is sent only after the backward, those that
the next forward reads first before the others (`graphopt.schedule.launch_order` says why and how
much): so the first layers do not stand behind all others on a slow link. Products of matrices whose
results are held back are computed after the backward as well, others as soon as they can be
(`graphopt.schedule.deferral`). The default pipeline holds back four tenths. Buckets that share an
update, as with clipping, all stay where they are; nor is anything held back where the forward waits
for a collective of the same group, such as the broadcast of BatchNorm's buffers, behind which it
would stand.

Needs optimizers that update each parameter on its own; the lists of fused and foreach optimizers
are split (`graphopt.optim.split_updates`) once it is known which buckets move, of which each has
parts of its own behind its wait. Bitwise: every element is computed as before.

With `target_comm_node`, that collective itself moves as well, with everything that follows from it.
Flushing then communicates, so that all ranks have to do it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from graphopt.comm import CommBlock, get_all_comm_blocks, get_comm_block
from graphopt.cost import default_cost_model
from graphopt.errors import IterationError
from graphopt.graph_utils import (
    get_output,
    is_collective,
    is_wait,
    move_before,
    readers_through_views,
    written,
)
from graphopt.ir.metadata import NAME, is_held, is_held_somewhere, is_launch_kept, sent_names
from graphopt.iter_graph import IterGraphModule
from graphopt.iter_graph.late_exclusions import staying_nodes
from graphopt.manager import PassArgumentError, graph_optimization_pass
from graphopt.manager.notes import note
from graphopt.optim import split_updates
from graphopt.readable.columns import readable_bytes
from graphopt.schedule.deferral import defer_products, hasten
from graphopt.schedule.launch_order import Send, apply_launch_order, hold_back

REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


@graph_optimization_pass(
    prerequisites=["remove_copy_from_optimizer"], apply_after=["schedule_comm_wait"]
)
def iter_move_grads_and_optimizers(
    gm: IterGraphModule,
    target_comm_node: str | None = None,
    target_dest_node: str | None = None,
    held_back: float = 0.0,
) -> int:
    """Wait for gradients and update their parameters one iteration late.

    Args:
        target_comm_node: name of one collective to move, with all that follows from it; None: the
            waits and updates of every bucket whose move helps.
        target_dest_node: name of the node to move before; None: the first read of the parameters.
        held_back: share of the bytes of gradients, from 0 to below 1, that is sent only after the
            backward, while the next forward computes; only of buckets that move.

    Returns:
        How many waits moved.

    Raises:
        IterationError: no such node, or it cannot move.
        PassArgumentError: `held_back` is not such a number.
    """
    _check_share(held_back)
    destination = None if target_dest_node is None else _named(gm.graph, target_dest_node)
    if target_comm_node is not None:
        return _move_collective(gm, _named(gm.graph, target_comm_node), destination)
    blocks = _blocks_to_move(gm)
    updates = split_updates(gm, [block.outputs for block in blocks]) if blocks else []
    moved = _merged(blocks, updates)
    end = get_output(gm.graph)
    for nodes in moved:
        move_before(nodes, end)
    if destination is None:
        share = 0.0 if _waits_before(gm, blocks) else held_back
        moved = _held_back(gm.graph, blocks, moved, share)
    moved = _unheld(moved)
    for nodes, before in zip(moved, _destinations(gm.graph, moved), strict=True):
        gm.graph.move_to_next_iter_before(nodes, destination or before)
    return sum(is_wait(node) for nodes in moved for node in nodes)


def _check_share(held_back: float) -> None:
    is_number = isinstance(held_back, (int, float)) and not isinstance(held_back, bool)
    if not is_number or not 0 <= held_back < 1:
        raise PassArgumentError(
            f"held_back={held_back!r}: give the share of gradients to send after the backward, a"
            " number from 0 to below 1 (0.4 where the backward takes twice the forward)"
        )


def _waits_before(gm: IterGraphModule, blocks: Sequence[CommBlock]) -> bool:
    """True if the step waits for another collective of the same groups before it sends
    gradients, such as a broadcast of buffers, which would queue behind gradients that are held
    back."""
    if not blocks:
        return False
    groups = {block.group for block in blocks}
    first, sends = blocks[0].comm_node, {block.comm_node for block in blocks}
    return any(
        block.group in groups and wait < first
        for block in get_all_comm_blocks(gm)
        if block.comm_node not in sends
        for wait in block.wait_nodes
    )


def _held_back(
    graph: fx.Graph, blocks: Sequence[CommBlock], moved: list[list[fx.Node]], share: float
) -> list[list[fx.Node]]:
    """Sends a share of the buckets after the backward; returns `moved` in the new launch order.

    Where buckets share an update, as with clipping, it waits for all, and none is held back; nor
    where ranks of the group may run another graph.
    """
    if any(block.kind in GATHERS for block in blocks):
        return moved  # `schedule_gathers` has placed them
    if len(moved) != len(blocks) or any(is_launch_kept(block.comm_node) for block in blocks):
        hasten(graph, {block.comm_node for block in blocks})
        return moved
    position = {node: index for index, node in enumerate(graph.nodes)}
    update = {block.comm_node: nodes for block, nodes in zip(blocks, moved, strict=True)}
    due = [position[read] for read in _first_reads(graph, moved)]
    now = [any(map(is_held_somewhere, _states(nodes))) for nodes in moved]
    sends = [Send(b.comm_node, b.nbytes, d, n) for b, d, n in zip(blocks, due, now, strict=True)]
    order = hold_back(sends, share)
    apply_launch_order(order)
    hasten(graph, {send.launch for send in order.at_once})
    defer_products(graph, [send.launch for send in order.held])
    return [update[send.launch] for send in order.sends]


def _unheld(moved: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """The updates that may be late: those behind the last one whose parameters are held elsewhere
    on this rank. The launch order, common to all ranks, does not depend on it."""
    for index in reversed(range(len(moved))):
        held = next(filter(is_held, _states(moved[index])), None)
        if held is not None:
            name = held.meta.get(NAME, held.name)
            stay = f"{index + 1} of {len(moved)} updates stay in their iteration"
            note(f"{stay}: {name} is held elsewhere, where its use cannot be seen")
            return moved[index + 1 :]
    return moved


def _states(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [state for node in nodes for state in written(node)]


def _move_collective(gm: IterGraphModule, launch: fx.Node, destination: fx.Node | None) -> int:
    if not is_collective(launch):
        raise IterationError(f"%{launch.name} is not a collective: {launch.format_node()}")
    block = get_comm_block(launch)
    (update,) = split_updates(gm, [block.outputs])
    nodes = sorted({launch, *block.tail, *update})
    before = destination or _destinations(gm.graph, [nodes])[0]
    gm.graph.move_to_next_iter_before(nodes, before)
    return 1


def _named(graph: fx.Graph, name: str) -> fx.Node:
    for node in graph.nodes:
        if node.name == name:
            return node  # type: ignore[no-any-return]
    raise IterationError(f"the graph has no node named {name!r}")


def _blocks_to_move(gm: IterGraphModule) -> list[CommBlock]:
    """The longest run of gradient buckets, counted from the last launch, that can move."""
    graph = gm.graph
    blocks = [
        block
        for block in get_all_comm_blocks(gm, kinds=REDUCTIONS + GATHERS)
        if not any(graph.is_late(wait) for wait in block.wait_nodes)
    ]
    if not blocks:
        note("the graph has no all-reduce or reduce-scatter that is waited for in its iteration")
    staying = staying_nodes(graph)
    chosen: list[CommBlock] = []
    for index, block in reversed(list(enumerate(blocks))):
        held = next((node for node in block.outputs if node in staying), None)
        if held is not None:
            note(_what_stays(graph, blocks, index, staying[held][1]))
            break
        chosen.insert(0, block)
    return chosen


def _what_stays(graph: fx.Graph, blocks: Sequence[CommBlock], last: int, reason: str) -> str:
    """A log text: the buckets that are waited for in their own iteration, why, and the cost."""
    costs = default_cost_model(graph)
    seconds = sum(costs.transfer(block.comm_node).seconds for block in blocks[: last + 1])
    size = readable_bytes(sum(block.nbytes for block in blocks[: last + 1]))
    head = f"{last + 1} of {len(blocks)} buckets ({size}) are waited for in their own iteration"
    cost = f"up to {1e3 * seconds:.2g} ms of communication per step, by the cost tables"
    name = ", ".join(sent_names(blocks[last].comm_node)[:2])
    return f"{head}, which costs {cost}: {reason}" + (f" (gradient of {name})" if name else "")


def _merged(blocks: Sequence[CommBlock], updates: Sequence[list[fx.Node]]) -> list[list[fx.Node]]:
    """Joins each wait with its update, in launch order; an update that several buckets share, as
    with clipping, stands at the last of them."""
    waits: dict[int, list[fx.Node]] = {}
    found: dict[int, list[fx.Node]] = {}
    for block, update in zip(blocks, updates, strict=True):
        key = id(update)
        waits.setdefault(key, []).extend(block.tail)
        found.pop(key, None)
        found[key] = [*waits[key], *update]
    return list(found.values())


def _destinations(graph: fx.Graph, moved: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The node that each set is moved before: the first read of anything that it or a later set
    updates. Where the read is a gather, only the set's own updates count."""
    earliest = get_output(graph)
    found: list[fx.Node] = []
    for read in reversed(_first_reads(graph, moved)):
        earliest = min(read, earliest)
        found.insert(0, read if is_collective(read) else earliest)
    return found


def _first_reads(graph: fx.Graph, moved: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The first read of what each set of nodes updates, or the end of the graph."""
    late = {node for nodes in moved for node in nodes}
    found = []
    for nodes in moved:
        states = dict.fromkeys(state for node in nodes for state in written(node))
        readers = [r for state in states for r in readers_through_views(state) if r not in late]
        found.append(min([*readers, get_output(graph)]))
    return found
