"""When updated parameters are gathered: early, so that a link is not idle, and most urgent first.

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

Nothing about the link has to be known. A graph in which no update is independent of the others, as
with clipping by the norm of all gradients, has its gathers at the end, in as many collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.comm import CommBlock
from graphopt.graph_utils import get_output, is_collective, is_wait, readers_through_views
from graphopt.ir.metadata import fake_value, input_kind, phase_of
from graphopt.ir.operators import is_copy
from graphopt.schedule.bucketing import bucket_kind
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.order import Schedule

LAG = 2 / 3
"""The share of the gradients' bytes that is scattered before what arrived is updated."""


@dataclass(eq=False)
class Gather:
    """A collective that completes an updated parameter.

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
class Group:
    """Gathers that are launched at one place.

    Attributes:
        gathers: of updates that need nothing else of this graph than one bucket of gradients.
        after: the launch behind which they may stand in the backward; None: at the end.
    """

    gathers: list[Gather]
    after: fx.Node | None = None

    @property
    def due(self) -> int:
        """When the first of them is needed."""
        return min(gather.due for gather in self.gathers)


def gathers_of_parameters(graph: fx.Graph) -> dict[fx.Node, Gather]:
    """The gathers that do nothing but complete a parameter, by launch."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = {}
    for node in graph.nodes:
        if is_collective(node) and (bucket_kind(node) or ("",))[0] == "all_gather_into_tensor":
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
    """What follows from a gather, if that is a copy into a parameter and nothing else."""
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
    gathers: dict[fx.Node, Gather], blocks: Sequence[CommBlock], updates: Sequence[list[fx.Node]]
) -> list[Group]:
    """Gathers by the bucket of gradients that their update needs; where updates need all of them,
    in as many groups, by when they are needed.

    Args:
        blocks: the collectives of gradients, in launch order.
        updates: of each the nodes of its update; one list for several that share one.
    """
    total = sum(block.nbytes for block in blocks)
    sent, launched = 0, []
    for block in blocks:
        sent += block.nbytes
        launched.append(sent)
    found: list[Group] = []
    seen: set[int] = set()
    for index, nodes in enumerate(updates):
        mine = [gathers[node] for node in nodes if node in gathers]
        if not mine or id(nodes) in seen:
            continue
        seen.add(id(nodes))
        if sum(other is nodes for other in updates) > 1:
            found += _by_size(mine, max(len(blocks), 1))
            continue
        later = (
            b for b, at in zip(blocks, launched, strict=True) if at - launched[index] >= LAG * total
        )
        block = next(later, None)
        found.append(Group(mine, None if block is None else block.comm_node))
    return found


def _by_size(gathers: list[Gather], count: int) -> list[Group]:
    """Gathers in the order in which they are needed, in groups of about one size."""
    limit = sum(gather.nbytes for gather in gathers) / count
    groups: list[Group] = []
    room = 0.0
    for gather in sorted(gathers, key=lambda each: each.due):
        if room <= 0:
            groups.append(Group([]))
            room = limit
        groups[-1].gathers.append(gather)
        room -= gather.nbytes
    return groups


class GatherOrder:
    """Puts the nodes of a graph into the order in which groups of gathers are launched.

    Args:
        before: what each node needs (`graphopt.schedule.constraints`).
    """

    def __init__(self, graph: fx.Graph, before: Predecessors, groups: Sequence[Group]) -> None:
        self._nodes, self._before, self._groups = list(graph.nodes), before, groups
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._end = get_output(graph)
        self._order: list[fx.Node] = []
        self._done: set[fx.Node] = set()
        self._buckets: list[tuple[fx.Node, ...]] = []

    def schedule(self) -> Schedule:
        """The order, and the gathers that become one collective each."""
        launches = {gather.launch for group in self._groups for gather in group.gathers}
        tails = {node for group in self._groups for g in group.gathers for node in g.tail}
        held = launches | tails | self._only_for(launches)
        at = {group.after: group for group in self._groups if group.after is not None}
        at_end = [group for group in self._groups if group.after is None]
        ended = False
        for node in self._nodes:
            if node in held or node is self._end:
                continue
            if not ended and is_wait(node) and phase_of(node) != "forward" and self._is_last(node):
                ended = True
                self._launch_all(at_end)
            self._emit(node)
            group = at.pop(node, None)
            if group is not None and not self._launch_now(group):
                at_end.append(group)
        self._launch_all(at_end)
        for node in self._nodes:
            self._emit(node)
        return Schedule(tuple(self._order), tuple(self._buckets))

    def _is_last(self, node: fx.Node) -> bool:
        """Whether the backward is over where a node stands."""
        return all(launch in self._done for launch in self._reductions)

    @property
    def _reductions(self) -> list[fx.Node]:
        return [
            node
            for node in self._nodes
            if is_collective(node)
            and not any(g.launch is node for gr in self._groups for g in gr.gathers)
        ]

    def _only_for(self, launches: set[fx.Node]) -> set[fx.Node]:
        """Nodes of the optimizer that lead to the gathers: they move with them."""
        found = set(launches)
        for node in reversed(self._nodes):
            if node in found or node.op != "call_function":
                continue
            users = [user for user in node.users if user.op != "output"]
            mine = phase_of(node) in ("optimizer", "communication") and not is_collective(node)
            if mine and users and found.issuperset(users):
                found.add(node)
        return found - launches

    def _launch_all(self, groups: list[Group]) -> None:
        for group in sorted(groups, key=lambda each: each.due):
            self._launch(group)
        groups.clear()

    def _launch_now(self, group: Group) -> bool:
        """Launch a group in the middle of the backward, unless its update needs what comes later."""
        needed = self._needed(gather.launch for gather in group.gathers)
        if any(is_collective(node) or phase_of(node) in ("forward", "backward") for node in needed):
            return False
        self._launch(group)
        return True

    def _needed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """What has to run before some nodes, and has not."""
        found: set[fx.Node] = set()
        pending = [source for node in nodes for source in self._before[node]]
        while pending:
            node = pending.pop()
            if node not in found and node not in self._done:
                found.add(node)
                pending += self._before[node]
        return found

    def _launch(self, group: Group) -> None:
        launches = [gather.launch for gather in group.gathers]
        for node in sorted(self._needed(launches), key=self._position.__getitem__):
            self._emit(node)
        kinds: dict[object, list[fx.Node]] = {}
        for launch in launches:
            kinds.setdefault(bucket_kind(launch), []).append(launch)
        for alike in kinds.values():
            for launch in alike:
                self._emit(launch)
            if len(alike) > 1:
                self._buckets.append(tuple(alike))

    def _emit(self, node: fx.Node) -> None:
        """Put a node into the order, and what it needs before it."""
        pending = [node]
        while pending:
            last = pending[-1]
            if last in self._done:
                pending.pop()
                continue
            missing = [source for source in self._before[last] if source not in self._done]
            if missing:
                pending += sorted(missing, key=self._position.__getitem__, reverse=True)
            else:
                self._done.add(last)
                self._order.append(pending.pop())
