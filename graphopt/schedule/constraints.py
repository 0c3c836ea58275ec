"""Order constraints between a step's nodes: pairs of which the first must come first.

Beside values these are: updates in place and those who read what they overwrite, random numbers,
functions of the user's on the host, and what a collective reads until its wait. The order of
launches is free, since all ranks decide it alike, but that none goes past a decision: what a rank
has sent before one is sent on each of its branches.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from graphopt.graph_utils import is_collective, is_needed, is_random, is_wait, written
from graphopt.host import is_host_call
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.effects import Effects
from graphopt.ir.views import launch_of

Predecessors = dict[fx.Node, list[fx.Node]]


def predecessors(graph: fx.Graph) -> Predecessors:
    """Maps each node to nodes that must precede it; near-linear in size."""
    found = {node: list(node.all_input_nodes) for node in graph.nodes}
    _order_updates(graph, found)
    _chain((node for node in graph.nodes if is_random(node)), found)
    if any(map(is_host_call, graph.nodes)):
        _chain((node for node in graph.nodes if is_host_call(node) or written(node)), found)
    _chain((node for node in graph.nodes if _is_opaque(node)), found)
    _order_decisions(graph, found)
    return found


def _order_decisions(graph: fx.Graph, found: Predecessors) -> None:
    """Keeps launches behind the data-dependent decisions that precede them now."""
    decision: fx.Node | None = None
    for node in graph.nodes:
        if isinstance(node.target, Assumption):
            decision = node
        elif decision is not None and is_collective(node):
            found[node].append(decision)


def _order_updates(graph: fx.Graph, found: Predecessors) -> None:
    """Keeps readers of a storage between the updates where they are now."""
    effects = Effects(graph)
    updated = {effects.key(state) for node in graph.nodes for state in written(node)}
    last: dict[object, fx.Node] = {}
    readers: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        writes = {effects.key(state) for state in written(node)}
        reads = {effects.key(source) for source in _read(node)} & updated
        for key in reads | writes:
            if key in last:
                found[node].append(last[key])
        for key in writes:
            found[node] += readers.pop(key, [])
            last[key] = node
        for key in reads - writes:
            readers.setdefault(key, []).append(node)


def _read(node: fx.Node) -> Iterable[fx.Node]:
    """Returns the nodes whose storage a node reads; for a wait, also what was sent."""
    yield from node.all_input_nodes
    launch = launch_of(node) if is_wait(node) else None
    if launch is not None:
        yield from launch.all_input_nodes


def _is_opaque(node: fx.Node) -> bool:
    """True if a node has effects that are not known in detail."""
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    known = is_collective(node) or is_wait(node) or is_random(node) or is_host_call(node)
    return is_needed(node) and not known and not written(node)


def _chain(nodes: Iterable[fx.Node], found: Predecessors) -> None:
    """Keeps the order of `nodes`."""
    before: fx.Node | None = None
    for node in nodes:
        if before is not None:
            found[node].append(before)
        before = node
