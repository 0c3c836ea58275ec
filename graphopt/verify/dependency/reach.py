"""Reachability from many sources at once, with a bit of an integer for each source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphopt.verify.dependency.flow import DataFlow
from graphopt.verify.dependency.labels import CollectiveLabels

CHUNK = 8192
"""The number of sources followed at a time: bits for all at once would take quadratic memory."""

_MASK = (1 << CHUNK) - 1


class LabelReach:
    """Computes which sources reach each vertex of a data-flow graph, and through which collectives.

    A state is an integer: for each label, `CHUNK` bits say which sources reach a vertex along paths
    through the collectives of the label.
    """

    def __init__(self, flow: DataFlow, labels: CollectiveLabels) -> None:
        self._flow = flow
        self._labels = labels
        self._successors: list[list[int]] = [[] for _ in flow.predecessors]
        for vertex, needs in enumerate(flow.predecessors):
            for need in needs:
                self._successors[need].append(vertex)

    def states(self, sources: Mapping[int, int]) -> dict[int, int]:
        """Returns for each reached vertex its state: the sources that reach it, by collectives
        passed. `sources` maps vertices to numbers of bits."""
        states: dict[int, int] = {}
        for vertex in self._reached(sources):
            state = 1 << sources[vertex] if vertex in sources else 0
            for need in self._flow.predecessors[vertex]:
                state |= states.get(need, 0)
            launched = self._flow.launched.get(vertex)
            states[vertex] = state if launched is None else self._through(state, launched)
        return states

    def _reached(self, sources: Iterable[int]) -> Sequence[int]:
        """Returns the vertices reached from `sources`, in topological order."""
        found = set(sources)
        pending = list(found)
        while pending:
            for successor in self._successors[pending.pop()]:
                if successor not in found:
                    found.add(successor)
                    pending.append(successor)
        return sorted(found)

    def _through(self, state: int, collective: int) -> int:
        found = 0
        for label, bits in labelled(state):
            found |= bits << (self._labels.through(label, collective) * CHUNK)
        return found


def union(states: Mapping[int, int], vertices: Iterable[int]) -> int:
    """Returns the union of the states of `vertices`: the sources that reach a node which reads them
    all."""
    state = 0
    for vertex in vertices:
        state |= states.get(vertex, 0)
    return state


def missing(wanted: int, found: int, labels: CollectiveLabels) -> int:
    """Returns the sources of state `wanted` that `found` lacks. A source must come through at least
    the same collectives."""
    if not wanted & ~found:
        return 0
    available = dict(labelled(found))
    lost = 0
    for label, bits in labelled(wanted):
        for other in labels.including(label):
            bits &= ~available.get(other, 0)
        lost |= bits << (label * CHUNK)
    return lost


def labelled(state: int) -> Iterable[tuple[int, int]]:
    """Yields (label, bits) for each label that occurs in a state."""
    label = 0
    while state:
        bits = state & _MASK
        if bits:
            yield label, bits
        state >>= CHUNK
        label += 1


def numbers(bits: int, limit: int) -> list[int]:
    """Returns the positions of the lowest `limit` set bits."""
    found: list[int] = []
    while bits and len(found) < limit:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
