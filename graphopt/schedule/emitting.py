"""Construction of a node order in which planned groups of gathers are launched in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from graphopt.graph_utils import is_wait
from graphopt.schedule.bucketing import bucket_kind
from graphopt.schedule.constraints import Predecessors
from graphopt.schedule.order import Schedule


class Emitter:
    """An order of nodes under construction.

    The waits of a group that is one call stand together: until the last of them, nothing may
    overwrite what any member sends, and what does so follows the wait of that member.

    Args:
        nodes: in the order that they have.
        before: what each of them needs (`graphopt.schedule.constraints`).

    Attributes:
        done: the nodes that have their place.
    """

    def __init__(self, nodes: Iterable[fx.Node], before: Predecessors) -> None:
        self._before = before
        self._position = {node: index for index, node in enumerate(nodes)}
        self._order: list[fx.Node] = []
        self._buckets: list[tuple[fx.Node, ...]] = []
        self._waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.done: set[fx.Node] = set()

    def finished(self) -> Schedule:
        """Appends the remaining nodes; returns the order, with the launches that become one
        collective each."""
        for node in self._position:
            self.emit(node)
        return Schedule(tuple(self._order), tuple(self._buckets))

    def emit(self, node: fx.Node) -> None:
        """Appends a node, after everything that it needs."""
        pending = [node]
        while pending:
            last = pending[-1]
            if last in self.done:
                pending.pop()
                continue
            missing = [source for source in self._before[last] if source not in self.done]
            if missing:
                pending += sorted(missing, key=self._position.__getitem__, reverse=True)
            else:
                self.done.add(last)
                self._order.append(pending.pop())
                pending += self._waits.get(last, ())

    def needed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Returns the nodes that must run before some others and have not been placed."""
        found: set[fx.Node] = set()
        pending = [source for node in nodes for source in self._before[node]]
        while pending:
            node = pending.pop()
            if node not in found and node not in self.done:
                found.add(node)
                pending += self._before[node]
        return found

    def launch(self, launches: Sequence[fx.Node]) -> None:
        """Appends launches of gathers, one call for each kind, after the values they send."""
        for node in sorted(self.needed(launches), key=self._position.__getitem__):
            self.emit(node)
        kinds: dict[object, list[fx.Node]] = {}
        for launch in launches:
            if launch not in self.done:
                kinds.setdefault(bucket_kind(launch), []).append(launch)
        for alike in kinds.values():
            for launch in alike:
                self.emit(launch)
            if len(alike) > 1:
                self._buckets.append(tuple(alike))
                waits = tuple(w for launch in alike for w in launch.users if is_wait(w))
                self._waits.update(dict.fromkeys(waits, waits))
