"""Updates of state before the place where all ranks vote if a step goes on.

    launch   copy_(buffer, mean)   launch   vote    update
             └──────────────────────────────▶ held

A rank that ends the step at a vote has changed nothing. An update that nothing before the vote
needs is moved behind it. Where something does, as a gather of updated rows or a callback, what was
there before is kept, and put back when the step ends there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphopt.graph_utils import is_collective, written
from graphopt.host import is_host_call
from graphopt.host.running import keep
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import STATE_KINDS, input_kind, late_group, set_value
from graphopt.schedule.constraints import Predecessors, predecessors

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
    updates = [
        node for node in earlier if late_group(node) is None and updated_state(node, effects)
    ]
    if not updates:
        return commit
    before = predecessors(graph)
    held: set[fx.Node] = set()
    first: dict[fx.Node, fx.Node] = {}
    for update in reversed(updates):
        needing = _needing(update, earlier, before)
        if any(map(_stays, needing)):
            first |= dict.fromkeys(updated_state(update, effects), update)
        else:
            held |= needing
    moved = [node for node in earlier if node in held]
    for node in moved:
        commit.prepend(node)
    for state, update in first.items():
        with graph.inserting_before(update):
            set_value(graph.call_function(keep, (state,)), None)
    return moved[0] if moved else commit


def _needing(update: fx.Node, earlier: Sequence[fx.Node], before: Predecessors) -> set[fx.Node]:
    """An update and what must follow it, as far as that precedes the vote now."""
    found = {update}
    for node in earlier[earlier.index(update) :]:
        if not found.isdisjoint(before[node]):
            found.add(node)
    return found


def _stays(node: fx.Node) -> bool:
    return is_collective(node) or is_host_call(node) or late_group(node) is not None
