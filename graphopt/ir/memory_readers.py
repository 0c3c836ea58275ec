"""The readers of each node's memory, and the last of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import fx

from graphopt.ir.operators import is_copy, is_wait, may_alias, operator_of
from graphopt.ir.views import is_awaited, is_pure_view, is_update, launch_of, may_be_view


def replaced_by(node: fx.Node) -> fx.Node | None:
    """Returns the destination that a `copy_` replaces as a whole, and therefore does not read, or
    None."""
    if not is_copy(node):
        return None
    destination = node.args[0]
    if destination is node.args[1] or not isinstance(destination, fx.Node):
        return None
    whole = destination
    while is_update(whole):
        whole = whole.all_input_nodes[0]
    return None if is_pure_view(whole) or may_be_view(whole) else destination


def values_read(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node whose values influence its result."""
    replaced = replaced_by(node)
    if replaced is None:
        return node.all_input_nodes
    return [source for source in node.all_input_nodes if source is not replaced]


def read_by(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose memory a node reads; for a wait, also what its collective sends."""
    if node.op == "output":
        return []
    if is_wait(node):
        launch = launch_of(node)
        if launch is not None and operator_of(launch).reads_until_wait:
            return [*node.all_input_nodes, *launch.all_input_nodes]
    return values_read(node)


class ReadersOfClasses:
    """The readers of each alias class of a graph.

    Those that read what a `copy_` has put there are kept apart: `renewed`. An index of readers is a
    pair of the class and whether it is of those.

    Attributes:
        renewed: nodes that hold what a `copy_` has put into their storage.
        in_flight: classes that a collective reads when the graph has ended.
    """

    def __init__(self, graph: fx.Graph, find: Callable[[object], object]) -> None:
        self._find = find
        self._readers: dict[tuple[object, bool], list[fx.Node]] = defaultdict(list)
        self._last: dict[tuple[object, bool], fx.Node] = {}
        self.renewed: set[fx.Node] = set()
        self.in_flight: set[object] = set()
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: fx.Node) -> None:
        if is_copy(node) or (may_alias(node) and node.all_input_nodes[0] in self.renewed):
            self.renewed.add(node)
        for source in read_by(node):
            index = self._find(source), source in self.renewed
            self._readers[index].append(node)
            self._last[index] = node  # nodes come in their order
        if operator_of(node).reads_until_wait and not is_awaited(node):
            self.in_flight.update(map(self._find, node.all_input_nodes))

    def note(self, root: object, reader: fx.Node) -> None:
        """Adds a reader to a class."""
        self._readers[root, False].append(reader)
        self._last.pop((root, False), None)

    def join(self, kept: object, gone: object) -> None:
        """Merges two classes."""
        for renewed in (False, True):
            readers = self._readers.pop((gone, renewed), None)
            last = self._last.pop((gone, renewed), None)
            if not readers:
                continue
            ours = self._readers[kept, renewed]
            both = last is not None and (not ours or (kept, renewed) in self._last)
            longer, shorter = (ours, readers) if len(ours) > len(readers) else (readers, ours)
            longer += shorter
            self._readers[kept, renewed] = longer
            known = self._last.pop((kept, renewed), None)
            if both and last is not None:
                self._last[kept, renewed] = last if known is None else max(last, known)
        if gone in self.in_flight:
            self.in_flight.add(kept)

    def forget_last(self, root: object) -> None:
        """Drops the cached last reader of a class, because a reader has moved."""
        self._last.pop((root, False), None)
        self._last.pop((root, True), None)

    def after(self, root: object, place: fx.Node, *, renewed: bool) -> bool:
        """True if a class is read after `place`: its new contents if `renewed`, else its old
        ones."""
        if root in self.in_flight:
            return True
        readers = self._readers.get((root, renewed))
        if not readers:
            return False
        last = self._last.get((root, renewed))
        if last is None:
            last = self._last[root, renewed] = max(readers)
        return last > place
