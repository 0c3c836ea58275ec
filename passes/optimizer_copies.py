"""Removes copies that tracing an optimizer leaves and that nobody reads.

Before:                                            After:

    wait      = wait_tensor(all_reduce)                wait      = wait_tensor(all_reduce)
    fused     = _fused_adam([param], [wait], ...)      fused     = _fused_adam([param], [wait], ...)
    getitem   = fused[0]; getitem_1 = getitem[0]       getitem   = fused[0]; getitem_1 = getitem[0]
    copy_     = copy_(param, getitem_1)                copy_     = copy_(param, getitem_1)
    getitem_2 = fused[1]; getitem_3 = getitem_2[0]     output(([loss], [copy_], []))
    copy__1   = copy_(wait, getitem_3)
    output(([loss], [copy_], []))

An *orphan* is a `copy_` without users; one that is listed among the outputs has a user. An orphan
is removed when a `_foreach_*` or `_fused_*` operator is at most five nodes above it and nobody
reads what it writes. Nodes that lose their last user go with it. Numerics do not change.

Who reads the destination of a copy:

- later nodes of the step, directly or through any alias;
- whoever gets the results of the step, if its storage is among them;
- for an input of the step and a constant of the module: the next iteration, and the user between
  two steps. What the step leaves there always counts as read. Such an orphan goes only if, later in
  the same step and before any read, another `copy_` overwrites the same destination.

So an orphan that updates a parameter stays, although it should have been listed as an update. Late
nodes stay.
"""

from __future__ import annotations

from operator import attrgetter

from torch import fx

from graphopt.comm import late_nodes
from graphopt.ir.effects import Effects
from graphopt.ir.memory_readers import values_read
from graphopt.ir.operators import calls_of, is_copy, is_list_operator
from graphopt.manager import graph_optimization_pass

MAX_OPTIMIZER_DISTANCE = 5


@graph_optimization_pass(whole_step=True)
def remove_copy_from_optimizer(gm: fx.GraphModule) -> int:
    """Remove orphan copies of an optimizer that nobody reads. Returns how many."""
    late = late_nodes(gm.graph)
    copies = calls_of(gm.graph, attrgetter("copies"))
    orphans = {copy for copy in copies if not copy.users and copy not in late}
    if not orphans:
        return 0
    near = _near_optimizer(gm.graph)
    unread = _unread(gm.graph, orphans)
    removable = [copy for copy in unread if copy in near]
    for copy in removable:
        gm.graph.erase_node(copy)
    return len(removable)


def _near_optimizer(graph: fx.Graph) -> set[fx.Node]:
    """Nodes at most `MAX_OPTIMIZER_DISTANCE` below a list operator of an optimizer."""
    distance: dict[fx.Node, int] = {}
    for node in graph.nodes:
        above = [distance[source] for source in node.all_input_nodes if source in distance]
        steps = 0 if is_list_operator(node) else min(above, default=MAX_OPTIMIZER_DISTANCE) + 1
        if steps <= MAX_OPTIMIZER_DISTANCE:
            distance[node] = steps
    return set(distance)


def _unread(graph: fx.Graph, orphans: set[fx.Node]) -> list[fx.Node]:
    """The orphan copies whose destination nobody reads afterwards."""
    effects = Effects(graph)
    unread: list[fx.Node] = []
    overwritten_next: dict[fx.Node, fx.Node] = {}  # input of the step -> destination of a copy_
    for node in reversed(graph.nodes):
        if is_copy(node):
            destination = node.args[0]
            assert isinstance(destination, fx.Node)
            owner = effects.input_of(destination)
            if node in orphans and (
                overwritten_next.get(owner) is destination
                if owner is not None
                else _is_private(effects, node, destination)
            ):
                unread.append(node)
            if owner is not None:
                overwritten_next[owner] = destination
        for source in values_read(node):
            owner = effects.input_of(source)
            if owner is not None:
                overwritten_next.pop(owner, None)
    return unread


def _is_private(effects: Effects, copy: fx.Node, destination: fx.Node) -> bool:
    """True if `copy` writes into a value that the step computes and does not return."""
    if effects.leaves_the_graph(destination):
        return False
    return not effects.read_after(destination, copy)
