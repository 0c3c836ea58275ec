"""Cuts between regions, so that a step with regions holds no more at once than without.

A region starts when all its inputs are there, and what needs its results waits for all of it:

    mask1 │ block1 │ mask2 │ block2            mask1 mask2 │ block1 block2

On the right the two blocks are one region, and both masks are held before it. The account is the
simulator's (`graphopt.schedule.program`), operator by operator in the order in which regions run.
Where it finds more than the graph holds at its fullest, the part of the graph in which that happens
is cut in two, and regions end there. Of the places near its middle, the cut takes the one at which
least is held. A part of a few operators has no region, and runs in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import fx

from graphopt.comm import late_nodes
from graphopt.lowering.levels import run_order
from graphopt.readable.columns import readable_bytes
from graphopt.schedule.program import Program, Storages, held_bytes, peak_bytes, steady_order

TOLERANCE = 1.02
"""How much more than before a step with regions may hold at its fullest, as a factor."""


class RegionMemory:
    """The memory account of one graph, and the cuts between regions that keep its peak low.

    Args:
        free: nodes that are computed wherever they are needed.

    Attributes:
        before: the most bytes of values that the graph holds at once.
        whole: the same, with regions as large as they can be.
        cuts: the nodes before which regions end.
    """

    def __init__(self, graph: fx.Graph, free: Collection[fx.Node]) -> None:
        self._free, self._late = free, frozenset(late_nodes(graph))
        self._storages = Storages()
        self._order = list(run_order(graph))
        whole = list(steady_order(graph))
        self._ends = [n for n in whole if n.op in ("placeholder", "get_attr")], [whole[-1]]
        held = held_bytes(Program(whole, self._late, {}, []), self._storages)
        self._held = dict(zip(whole, map(int, held), strict=True))
        self.before = self.whole = max(self._held.values(), default=0)
        self.cuts: set[fx.Node] = set()

    def order(self) -> Iterator[fx.Node | None]:
        """Yields the calls as they run, as `run_order` gives them; None at cuts as well."""
        for node in self._order:
            if node in self.cuts:
                yield None
            yield node

    def cut(self, place: Callable[[fx.Node], tuple[int, int]]) -> bool:
        """Cuts regions where they would hold too much memory.

        Args:
            place: level and region of a call; they run in this order.

        Returns:
            Whether there is a cut more.
        """
        calls = sorted((node for node in self._order if node is not None), key=place)
        order = [*self._ends[0], *placed_where_needed(calls, self._free), *self._ends[1]]
        held = held_bytes(Program(order, self._late, {}, []), self._storages)
        if not self.cuts:
            self.whole = int(held.max(initial=0))
        most = TOLERANCE * self.before
        if held.max(initial=0) <= most:
            return False
        full = {node for node, size in zip(order, held, strict=True) if size > most}
        found = [self._middle(part) for part in self._parts() if not full.isdisjoint(part)]
        new = {node for node in found if node is not None}
        self.cuts |= new
        return bool(new)

    def note(self) -> str:
        """Returns a text that says how many cuts there are, and why; empty if there are none."""
        if not self.cuts:
            return ""
        sizes = map(readable_bytes, (self.whole, self.before))
        return "regions end at {} more places: without, {} would be held at once, not {}".format(
            len(self.cuts), *sizes
        )

    def _parts(self) -> Iterator[list[fx.Node]]:
        part: list[fx.Node] = []
        for node in self.order():
            if node is not None:
                part.append(node)
            elif part:
                yield part
                part = []
        yield part

    def _middle(self, part: Sequence[fx.Node]) -> fx.Node | None:
        """Returns the node near the middle of a part before which least is held."""
        quarter = len(part) // 4
        near = part[max(1, quarter) : len(part) - quarter]
        return min(near, key=lambda node: self._held.get(node, 0), default=None)


def placed_where_needed(order: Iterable[fx.Node], free: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields nodes in order, those that are free just before the first that needs them."""
    given: set[fx.Node] = set()

    def needed(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            if source in free and source not in given:
                given.add(source)
                yield from needed(source)
                yield source

    for node in order:
        if node not in free:
            yield from needed(node)
            yield node


def peak_of(order: Iterable[fx.Node], free: Collection[fx.Node]) -> int:
    """Returns the most bytes that a graph without late nodes holds at once, in this order.

    Args:
        free: nodes that are computed wherever they are needed.
    """
    return peak_bytes(Program(list(placed_where_needed(order, free)), frozenset(), {}, []))
