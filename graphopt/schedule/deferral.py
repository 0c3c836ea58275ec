"""Deferral of weight gradients: computed when their collective is launched.

The backward makes last what the next forward reads first, so that what it makes last is sent while
nobody computes. A gradient that is sent only after the backward (`graphopt.schedule.launch_order`)
can be computed after it as well, and fills that time:

    g3 | send g3 | g2 | g1 | send g1 | (wait) | send g2       g2 is held back
    g3 | send g3 | g1 | send g1 | g2 | send g2                g1 travels while g2 is computed

What moves are the products of matrices that only this launch needs, with what follows from them;
sums of bias gradients stay, since they are cheap and share their input with the backward. What a
product reads lives longer, so nothing moves where the step would then hold more at its fullest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_needed, is_random, is_wait, written
from graphopt.graph_utils.nodes import with_own_inputs
from graphopt.ir.effects import Effects
from graphopt.ir.operators import calls_of, writers
from graphopt.schedule.order import Schedule, apply_schedule
from graphopt.schedule.program import Storages, step_peak_bytes


def defer_products(graph: fx.Graph, launches: Sequence[fx.Node]) -> int:
    """Moves what only `launches` need to just before them, as far as memory allows.

    Args:
        launches: collectives, the most urgent first; if memory is short, the first ones count.

    Returns:
        How many nodes moved.
    """
    order = Schedule(tuple(graph.nodes))
    storages = Storages()
    most = step_peak_bytes(graph, storages)
    chosen = list(launches)
    while chosen:
        moved = _defer(graph, chosen)
        if not moved or step_peak_bytes(graph, storages) <= most:
            return moved
        apply_schedule(graph, order)
        chosen = chosen[: len(chosen) // 2]
    return 0


def hasten(graph: fx.Graph, launches: Collection[fx.Node]) -> int:
    """Moves what only `launches` need, and the launches, as early as possible: a weight's gradient
    before the activation's.

    Nothing moves before the launch that is in front. So collectives keep their order, which the
    ranks share, also where inputs are there earlier on one; and no launch has to wait for another.

    Returns:
        How many nodes moved.
    """
    moved = 0
    previous: fx.Node | None = None
    for launch in calls_of(graph, attrgetter("collective")):
        if launch in launches:
            moved += sum(_raised(node, previous) for node in with_own_inputs(launch, _may_move))
        previous = launch
    return moved


def _raised(node: fx.Node, previous: fx.Node | None) -> bool:
    """Moves a node up behind its inputs and `previous`. Returns True if it moved."""
    needed = [source for source in node.all_input_nodes if source.op != "placeholder"]
    anchor = max([*needed, previous] if previous is not None else needed, default=None)
    if anchor is None or node < anchor or anchor.next is node:
        return False
    anchor.append(node)
    return True


def _defer(graph: fx.Graph, launches: Sequence[fx.Node]) -> int:
    effects = Effects(graph)
    updated = {effects.key(state) for node in writers(graph) for state in written(node)}

    def reads_state(node: fx.Node) -> bool:
        return any(effects.key(source) in updated for source in node.all_input_nodes)

    moved = 0
    for launch in launches:
        *own, _ = with_own_inputs(launch, _may_move)
        mine = [node for node in own if not reads_state(node)]
        following = launch
        for node in reversed(_from_products(mine, launch)):
            if following.prev is not node:
                following.prepend(node)
                moved += 1
            following = node
    return moved


def _may_move(node: fx.Node) -> bool:
    if node.op != "call_function" or is_needed(node) or written(node):
        return False
    return not (is_collective(node) or is_wait(node) or is_random(node))


def _from_products(nodes: Sequence[fx.Node], launch: fx.Node) -> list[fx.Node]:
    """Returns the matrix products among `nodes` and what depends on them; nothing if another node
    before `launch` must stay."""
    members = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if _compat.flop_formula(node.target) is not None or not found.keys().isdisjoint(
            node.all_input_nodes
        ):
            found[node] = None
    outside = {user for node in found for user in node.users} - members - {launch}
    return [] if outside else list(found)
