"""Orders a graph in levels, so that nodes which can be compiled together are adjacent.

Every node gets a *level*. Lowerable nodes of one level form one region. The order

    level 0: the nodes that stay, then the region; level 1: the nodes that stay, then the region; …

keeps all dependencies, because

- a node that stays is one level above the lowerable nodes it needs, and a lowerable node is not
  below the nodes that stay which it needs: so there is no way out of a region and back into it;
- what stands after the launch of a collective is not below it, so that no region delays a launch;
- a node that calls a function of the program's (`graphopt.callback`) is above the updates before
  it, and not above those behind it;
- a wait is above all that stands before it, so that what ran between launch and wait still does.

A node that stays and of which a region needs nothing breaks no region. One pass over the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from graphopt.graph_utils import is_collective, is_wait, written
from graphopt.host import is_host_call
from graphopt.ir.accesses import Accesses
from graphopt.ir.effects import Effects
from graphopt.ir.operators import draws, is_item
from graphopt.iter_graph import IterGraph
from graphopt.iter_graph.derive import LatePlan, plan
from graphopt.lowering.lowerable import reads_metadata_only


def levels_of(
    graph: fx.Graph, order: Iterable[fx.Node | None], effects: Effects, lowerable: set[fx.Node]
) -> dict[fx.Node, int]:
    """Returns the level of each call, given the run order and the calls that are lowerable."""
    levels: dict[fx.Node, int] = {}
    dependencies = _Dependencies(graph, effects)
    floor, highest = 0, -1
    for node in order:
        if node is None:
            floor = highest = highest + 1
            continue
        inside = node in lowerable
        level = floor
        if is_item(node):  # with the node that has the results
            level = max((levels[s] for s in node.all_input_nodes if s in levels), default=floor)
        for source in dependencies.of(node):
            if source in levels:
                above = source in lowerable and not inside
                level = max(level, levels[source] + above)
        if is_wait(node):
            level = max(level, highest + 1)
        levels[node] = level
        if is_collective(node):
            floor = level
        if inside:
            highest = max(highest, level)
    return levels


def run_order(graph: fx.Graph) -> Iterator[fx.Node | None]:
    """Yields calls in the order of an iteration with late nodes; None separates parts that must
    not be mixed."""
    planned = plan(graph) if isinstance(graph, IterGraph) else LatePlan([])
    late, groups = set(planned.late), planned.groups
    for node in graph.nodes:
        if node in groups:
            yield None
            yield from groups[node]
            yield None
        if node.op not in ("placeholder", "get_attr", "output") and node not in late:
            yield node


class _Dependencies:
    """The nodes that must run before each node, asked for in a valid order."""

    def __init__(self, graph: fx.Graph, effects: Effects) -> None:
        self._accesses = Accesses(effects, graph)
        self._last_draw: fx.Node | None = None
        self._last_call: fx.Node | None = None
        self._writers: list[fx.Node] = []

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes asked for earlier that must run before `node`."""
        found = [] if reads_metadata_only(node) else list(node.all_input_nodes)
        if draws(node):
            if self._last_draw is not None:
                found.append(self._last_draw)
            self._last_draw = node
        found += self._around_host_calls(node)
        found += [hazard.earlier for hazard in self._accesses.add(node)]
        return found

    def _around_host_calls(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the dependencies of host callbacks, which keep their order among themselves and
        with state updates, since they may raise."""
        if not is_host_call(node) and not written(node):
            return
        if self._last_call is not None:
            yield self._last_call
        if is_host_call(node):
            yield from self._writers
            self._last_call, self._writers = node, []
        else:
            self._writers.append(node)
