"""A graph in which some nodes are marked to run one iteration late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.errors import IterationError
from graphopt.iter_graph.rules import default_destination, refuse_foreign, refuse_move


class IterGraph(fx.Graph):
    """A training step as one graph, some nodes of which run in the next iteration.

    Passes edit it like any `fx.Graph`. The marks of late nodes follow edits: an erased node loses
    its mark, and an erased destination hands over to the node after it.

    The idea, moving work across the boundary of two iterations so that communication overlaps with
    the next forward, is that of software pipelining (Lam, "Software pipelining", PLDI 1988).

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = graphopt.IterGraphModule(captured.graph_module)
    >>> isinstance(gm.graph, graphopt.IterGraph), len(gm.graph.late)
    (True, 0)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: dict[fx.Node, fx.Node] = {}
        self._arriving: dict[fx.Node, set[fx.Node]] = {}

    @property
    def late(self) -> Mapping[fx.Node, fx.Node]:
        """Maps each late node to its destination, the node of the next iteration that it runs
        before."""
        return MappingProxyType(self._late)

    def is_late(self, node: fx.Node) -> bool:
        """True if `node` runs one iteration late."""
        return node in self._late

    def can_move_late(
        self, nodes: Iterable[fx.Node], target_node: fx.Node | None = None
    ) -> str | None:
        """Returns the reason why `nodes` cannot run in the next iteration, or None if they can.

        Args:
            nodes, target_node: as of `move_to_next_iter_before`, which raises for this reason.
        """
        moved = list(dict.fromkeys(nodes))
        try:
            self._destination(moved, target_node)
        except IterationError as error:
            return str(error)
        return None

    def move_to_next_iter_before(
        self, nodes: Iterable[fx.Node], target_node: fx.Node | None = None
    ) -> None:
        """Makes `nodes` run in the next iteration, just before `target_node`.

        Among themselves they keep the order they have in the graph. Nodes moved before may be moved
        again, to another destination.

        Args:
            nodes: with all their users, except state updates in the output.
            target_node: a node of this graph that stays in its iteration; may be the output node.
                None: the first node that reads what `nodes` update, which is as late as they can.

        Raises:
            IterationError: the nodes feed a user output, draw random numbers, update what is read
                before `target_node`, or have users that stay in this iteration. Nothing is moved.
        """
        moved = list(dict.fromkeys(nodes))
        destination = self._destination(moved, target_node)
        for node in moved:
            self.mark_late(node, destination)

    def _destination(self, moved: list[fx.Node], target_node: fx.Node | None) -> fx.Node:
        """Returns the node before which `moved` are to run; raises `IterationError` if they
        cannot."""
        if not moved:
            raise IterationError("no nodes to move were given")
        refuse_foreign(self, moved)
        destination = target_node or default_destination(self, self._late, moved)
        refuse_move(self, self._late, moved, destination)
        return destination

    def mark_late(self, node: fx.Node, destination: fx.Node) -> None:
        """Marks a node as late without a check; `check_late` checks it afterwards."""
        self._unmark(node)
        self._late[node] = destination
        self._arriving.setdefault(destination, set()).add(node)

    def _unmark(self, node: fx.Node) -> None:
        destination = self._late.pop(node, None)
        if destination is not None:
            self._arriving[destination].discard(node)

    def erase_node(self, to_erase: fx.Node) -> None:
        following = to_erase.next
        super().erase_node(to_erase)
        self._unmark(to_erase)
        arriving = self._arriving.pop(to_erase, set())
        while arriving and following in self._late:
            following = following.next
        for node in arriving:
            self._late[node] = following
        if arriving:
            self._arriving.setdefault(following, set()).update(arriving)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> IterGraph:
        graph, _ = copy_graph(self)
        assert isinstance(graph, IterGraph)
        if memo is not None:
            memo[id(self)] = graph
        return graph


def empty_like(graph: fx.Graph, into: Callable[[], fx.Graph] | None = None) -> fx.Graph:
    """Returns a graph without nodes and with the calling convention of `graph`; `into` is as in
    `copy_graph`."""
    make = into or (IterGraph if isinstance(graph, IterGraph) else fx.Graph)
    empty = make()
    _compat.copy_codegen(graph, empty)
    return empty


def copy_graph(
    graph: fx.Graph, into: Callable[[], fx.Graph] | None = None
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copies a graph, late marks included.

    Args:
        into: makes the new graph; None: one of the same class, `IterGraph` or `fx.Graph`.

    Returns:
        The copy, with the same node names in the same order, and the copy of each node. Metadata
        dictionaries are copied, the values in them (`meta["val"]`) are shared.

    >>> from graphopt.iter_graph import copy_graph
    >>> copied, copies = copy_graph(gm.graph)
    >>> [node.name for node in copied.nodes] == [node.name for node in copies]
    True
    """
    late = graph.late if isinstance(graph, IterGraph) else {}
    copy = empty_like(graph, into)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = _compat.copy_node(copy, node, copies.__getitem__)
    if isinstance(copy, IterGraph):
        for node, destination in late.items():
            copy.mark_late(copies[node], copies[destination])
    return copy, copies
