"""Launch times of gathers of updated parameters: early enough to keep links busy, most urgent
first.

    backward                                      | end               | next forward
    scatter 6  scatter 5  scatter 4  …  scatter 1 | gather 1  gather 2  gather 3  gather 4
                              update 6, gather 6  |         what is gathered last is needed last

A gradient can be scattered once the backward has made it; its parameter can be updated once that
has arrived, and is then gathered. Where sending everything takes as long as computing, and the
backward is two thirds of that, the link can send all scatters and a third of the gathers in the
backward, and the rest in the next forward. So what was scattered before the last two thirds (`LAG`)
of the backward's bytes is updated and gathered in the backward: by then it has arrived, unless the
link is much slower, and nobody waits for it. The others are gathered after the backward, in the
order in which the next forward reads them.

Nothing about the link has to be known. Where it is, as for GPUs, gathers go where it would idle
(`graphopt.schedule.early_gathers`). A graph in which no update is independent of the others, as
with clipping by the norm of all gradients, has its gathers at the end, in as many collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.comm import CommBlock
from graphopt.graph_utils import get_output, is_collective, is_wait, readers_through_views
from graphopt.ir.metadata import fake_value, input_kind, phase_of
from graphopt.ir.operators import is_copy
from graphopt.schedule.bucketing import GATHER, bucket_kind
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.emitting import Emitter
from graphopt.schedule.order import Schedule

LAG = 2 / 3
"""The share of the gradients' bytes that is scattered before the parameters of arrived gradients
are updated."""


@dataclass(eq=False)
class Gather:
    """A collective that gathers an updated parameter.

    Attributes:
        launch: its node.
        tail: what follows from it: the wait, views, and the copy into the parameter.
        due: place of the first node that reads the parameter.
        nbytes: of the parameter.
    """

    launch: fx.Node
    tail: list[fx.Node]
    due: int
    nbytes: int


@dataclass
class GatherGroup:
    """Gathers that are launched at one place.

    Attributes:
        gathers: of updates that need one bucket of gradients, or all.
        block: that bucket; None: all.
        after: the launch behind which they may stand in the backward; None: at the end.
    """

    gathers: list[Gather]
    block: CommBlock | None = None
    after: fx.Node | None = None

    @property
    def due(self) -> int:
        """The earliest place in the step where one of the gathered parameters is needed."""
        return min(gather.due for gather in self.gathers)

    @property
    def launches(self) -> list[fx.Node]:
        """The launches of all members."""
        return [gather.launch for gather in self.gathers]


def is_gather(node: fx.Node) -> bool:
    """True if a node launches a gather that can share a call with others."""
    return is_collective(node) and (bucket_kind(node) or ("",))[0] == GATHER


def gathers_of_parameters(graph: fx.Graph) -> dict[fx.Node, Gather]:
    """Returns the gathers whose result only goes into a parameter, by launch."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = {}
    for node in filter(is_gather, graph.nodes):
        tail = _tail(node)
        copies = [member for member in tail or () if is_copy(member)]
        if tail is None or len(copies) != 1:
            continue
        parameter: fx.Node = copies[0].args[0]  # type: ignore[assignment]
        readers = (r for r in readers_through_views(parameter) if r is not copies[0])
        due = min((position[r] for r in readers), default=len(position))
        found[node] = Gather(node, tail, due, fake_value(parameter).nbytes)
    return found


def _tail(launch: fx.Node) -> list[fx.Node] | None:
    """Returns the nodes after a gather if they only copy it into a parameter, or None."""
    found: dict[fx.Node, None] = {}
    pending = list(launch.users)
    while pending:
        node = pending.pop()
        if node.op == "output" or node in found:
            continue
        into = node.args[0] if is_copy(node) else None
        if is_copy(node) and (not isinstance(into, fx.Node) or input_kind(into) != "parameter"):
            return None
        if phase_of(node) not in ("communication", "optimizer") or is_collective(node):
            return None
        found[node] = None
        pending += node.users
    return sorted(found)


def grouped(
    gathers: Mapping[fx.Node, Gather], blocks: Sequence[CommBlock], updates: Sequence[list[fx.Node]]
) -> list[GatherGroup]:
    """Groups gathers by the gradient bucket that their update needs; if each update needs all
    buckets, by when they are needed.

    Args:
        blocks: the collectives of gradients, in launch order.
        updates: of each the nodes of its update; one list for several that share one.
    """
    shared = {id(nodes) for nodes in updates if sum(other is nodes for other in updates) > 1}
    found: list[GatherGroup] = []
    for nodes, block in zip(updates, blocks, strict=True):
        mine = [gathers[node] for node in nodes if node in gathers]
        if mine and id(nodes) not in shared:
            found.append(GatherGroup(mine, block))
    together = {node: None for nodes in updates if id(nodes) in shared for node in nodes}
    mine = [gathers[node] for node in together if node in gathers]
    return found + _by_size(mine, len(blocks))


def place_by_share(groups: Sequence[GatherGroup], blocks: Sequence[CommBlock]) -> None:
    """Places each group of gathers where enough bytes were sent after its bucket that this has
    arrived."""
    for group in groups:
        if group.block is not None:
            group.after = _later(group.block, blocks)


def _later(block: CommBlock, blocks: Sequence[CommBlock]) -> fx.Node | None:
    """Returns the launch that follows a block's arrival by the amount sent; None if that block is
    the last one."""
    passed = sum(other.nbytes for other in blocks) * LAG
    for other in blocks[blocks.index(block) + 1 : -1]:
        passed -= other.nbytes
        if passed <= 0:
            return other.comm_node
    return None


def _by_size(gathers: list[Gather], count: int) -> list[GatherGroup]:
    """Splits gathers, most urgent first, into groups of about equal size."""
    limit = sum(gather.nbytes for gather in gathers) / max(count, 1)
    groups: list[GatherGroup] = []
    room = 0.0
    for gather in sorted(gathers, key=lambda each: each.due):
        if room <= 0:
            groups.append(GatherGroup([]))
            room = limit
        groups[-1].gathers.append(gather)
        room -= gather.nbytes
    return groups


def order_of_gathers(
    graph: fx.Graph, before: Predecessors, groups: Sequence[GatherGroup]
) -> Schedule:
    """Returns an order with each group launched as soon as possible, the most urgent first at the
    end.

    Args:
        before: what each node needs (`graphopt.schedule.constraints`).
    """
    emitter, end = Emitter(graph.nodes, before), get_output(graph)
    launches = {launch for group in groups for launch in group.launches}
    held = launches | {node for group in groups for g in group.gathers for node in g.tail}
    held |= _only_for(graph, launches)
    early: dict[fx.Node, list[GatherGroup]] = {}
    for group in groups:
        if group.after is not None:
            early.setdefault(group.after, []).append(group)
    late = [group for group in groups if group.after is None]
    gradients = {node for node in graph.nodes if is_collective(node)} - launches
    for node in graph.nodes:
        if node in held or node is end:
            continue
        if is_wait(node) and phase_of(node) == "communication" and gradients <= emitter.done:
            _launch_all(emitter, late)
        emitter.emit(node)
        ready: list[GatherGroup] = []
        for group in early.pop(node, ()):
            (ready if _is_independent(emitter, group) else late).append(group)
        emitter.launch([launch for group in ready for launch in group.launches])
    _launch_all(emitter, late)
    return emitter.finished()


def _launch_all(emitter: Emitter, groups: list[GatherGroup]) -> None:
    for group in sorted(groups, key=lambda each: each.due):
        emitter.launch(group.launches)
    groups.clear()


def _is_independent(emitter: Emitter, group: GatherGroup) -> bool:
    """True if the update of a group needs nothing computed after the group's place."""
    needed = emitter.needed(group.launches)
    phases = ("forward", "backward")
    return not any(is_collective(node) or phase_of(node) in phases for node in needed)


def _only_for(graph: fx.Graph, launches: set[fx.Node]) -> set[fx.Node]:
    """Returns the optimizer nodes that lead only to gathers, and move with them."""
    found = set(launches)
    for node in reversed(graph.nodes):
        if node in found or node.op != "call_function" or is_collective(node):
            continue
        users = [user for user in node.users if user.op != "output"]
        mine = phase_of(node) in ("optimizer", "communication")
        if mine and users and found.issuperset(users):
            found.add(node)
    return found - launches
