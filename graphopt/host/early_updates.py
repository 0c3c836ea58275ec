"""Updates of state before the place where all ranks vote if a step goes on.

    launch   copy_(buffer, mean)   launch   vote    update
             └──────────────────────────────▶ held

A rank that ends the step at a vote has changed nothing. An update that nothing before the vote
needs is moved behind it. Where something does, as a gather of updated rows or a callback, what was
there before is kept, and put back when the step ends there.
"""

from __future__ import annotations

from torch import fx

from graphopt.graph_utils import is_collective, written
from graphopt.host import is_host_call
from graphopt.host.running import keep
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import STATE_KINDS, input_kind, late_group, set_value
from graphopt.schedule.constraints import predecessors

_UPDATED = STATE_KINDS | {"gradient"}


def updated_state(node: fx.Node, effects: Effects) -> list[fx.Node]:
    """The inputs, among state and gradients, that a node updates."""
    owners = (effects.input_of(state) for state in written(node))
    return [each for each in owners if each is not None and input_kind(each) in _UPDATED]


def with_updates_behind(graph: fx.Graph, commit: fx.Node) -> fx.Node:
    """Moves updates of state that precede `commit` directly before it, in their order, and keeps
    state whose updates cannot be moved.

    Returns:
        The node before which ranks vote.
    """
    nodes: list[fx.Node] = list(graph.nodes)
    earlier, effects = nodes[: nodes.index(commit)], Effects(graph)
    states = {node: updated_state(node, effects) for node in earlier if late_group(node) is None}
    if not any(states.values()):
        return commit
    before = predecessors(graph)
    stuck: set[fx.Node] = set()  # what stays, and what that needs
    for node in reversed(earlier):
        if node in stuck or _stays(node):
            stuck.update((node, *before[node]))
    moved: dict[fx.Node, None] = {}  # updates, and what must follow them, in order
    first: dict[fx.Node, fx.Node] = {}
    for node in earlier:
        updated = states.get(node, [])
        if node not in stuck and (updated or not moved.keys().isdisjoint(before[node])):
            moved[node] = None
        else:
            for state in updated:
                first.setdefault(state, node)
    for node in moved:
        commit.prepend(node)
    for state, update in first.items():
        with graph.inserting_before(update):
            set_value(graph.call_function(keep, (state,)), None)
    return next(iter(moved), commit)


def _stays(node: fx.Node) -> bool:
    return is_collective(node) or is_host_call(node) or late_group(node) is not None
