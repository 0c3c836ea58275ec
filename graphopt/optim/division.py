"""Divide the list operators of a graph so that each set of gradients has calls of its own."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

from torch import fx

from graphopt.graph_utils import is_operator, written
from graphopt.iter_graph import IterGraph
from graphopt.optim.components import NONE, UpdateComponents
from graphopt.optim.elements import Elements
from graphopt.optim.lists import ListOperator, OptimizerSplitError


class Division:
    """What to divide in one graph. Nothing is changed before `apply`.

    Args:
        sets: disjoint sets of nodes that hold gradients.
        only: the list operators that may be divided; None: all.

    Attributes:
        elements: of the graph as it was.
        components: the set of each of them.
        parts: once applied, the calls that each divided list operator became, by set.
    """

    def __init__(
        self,
        graph: fx.Graph,
        sets: Sequence[Sequence[fx.Node]],
        only: Collection[fx.Node] | None = None,
    ) -> None:
        self._graph = graph
        self.elements = Elements(graph)
        _check_gradients(self.elements, sets)
        self.components = UpdateComponents(graph, self.elements, sets)
        self.parts: dict[fx.Node, dict[int, fx.Node]] = {}
        self._set_of_new: dict[fx.Node, int] = {}
        self._lists = {
            node: found
            for node, found in self.elements.lists.items()
            if only is None or node in only
        }
        self._refuse_in_place()

    def entries(self, node: fx.Node) -> dict[int, list[int]]:
        """The entries of a list operator by their set, `NONE` last."""
        by_set: dict[int, list[int]] = {}
        for index in range(self._lists[node].length):
            owner = self.components.set_of(self.elements.element(node, index))
            by_set.setdefault(owner, []).append(index)
        return {owner: by_set[owner] for owner in sorted(by_set, key=lambda s: (s == NONE, s))}

    def apply(self) -> None:
        """Divide every list operator whose entries belong to several sets, or to one and none.

        Raises:
            OptimizerSplitError: late nodes are involved. Nothing is changed.
        """
        divided = {node: self.entries(node) for node in self._lists}
        divided = {node: by_set for node, by_set in divided.items() if len(by_set) > 1}
        refuse_late(self._graph, divided)
        for node, by_set in divided.items():
            self._divide(self._lists[node], by_set)

    def set_of(self, node: fx.Node) -> int:
        """The set that a node of the divided graph belongs to as a whole, or `NONE`."""
        if node in self._set_of_new:
            return self._set_of_new[node]
        return self.components.set_of(self.elements.number[node])

    def _divide(self, whole: ListOperator, by_set: dict[int, list[int]]) -> None:
        node, target = whole.node, cast(Any, whole.node.target)
        place: dict[int, tuple[int, int]] = {}
        parts: dict[int, fx.Node] = {}
        for owner, indices in by_set.items():
            with self._graph.inserting_before(node):
                parts[owner] = self._graph.call_function(target, *whole.select(indices))
            self._describe(parts[owner], node, whole.value(indices), owner)
            place.update({index: (owner, new) for new, index in enumerate(indices)})
        for container in whole.containers():
            sources = self._containers(whole, container, parts)
            for item in list(container.users):
                owner, index = place[_index(item)]
                item.args = (sources[owner], index)
            if whole.several:
                self._graph.erase_node(container)
        self._graph.erase_node(node)
        self.parts[node] = parts

    def _containers(
        self, whole: ListOperator, container: fx.Node, parts: dict[int, fx.Node]
    ) -> dict[int, fx.Node]:
        """The nodes that hold, of each part, what `container` held of the whole."""
        if not whole.several:
            return parts
        found: dict[int, fx.Node] = {}
        for owner, part in parts.items():
            with self._graph.inserting_before(container):
                found[owner] = self._graph.call_function(
                    operator.getitem, (part, container.args[1])
                )
            value = part.meta["val"][_index(container)]
            self._describe(found[owner], container, value, owner)
        return found

    def _describe(self, node: fx.Node, like: fx.Node, value: Any, owner: int) -> None:
        """Give a new node its metadata.

        To compute `val` anew would take longer than all else, and give what the whole call has.
        """
        node.meta = {**like.meta, "val": value}
        self._set_of_new[node] = owner

    def _refuse_in_place(self) -> None:
        for element, node in enumerate(self.elements.nodes):
            if self.components.set_of(element) == NONE or node.op != "call_function":
                continue
            if not is_operator(node.target, "aten::copy_") and written(node):
                raise OptimizerSplitError(
                    f"%{node.name} updates its arguments in place, so that the updates cannot be"
                    f" told apart\n  > {node.format_node()}"
                )


def _index(item: fx.Node) -> int:
    index = item.args[1]
    assert isinstance(index, int)
    return index


def refuse_late(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Refuse to replace nodes that run one iteration late, or before which late nodes run."""
    if not isinstance(graph, IterGraph):
        return
    destinations = set(graph.late.values())
    for node in nodes:
        if graph.is_late(node):
            raise OptimizerSplitError(
                f"%{node.name} runs one iteration late: split the optimizer before it is moved"
            )
        if node in destinations:
            raise OptimizerSplitError(
                f"late nodes run before %{node.name}: split the optimizer before they are moved"
            )


def _check_gradients(elements: Elements, sets: Sequence[Sequence[fx.Node]]) -> None:
    seen: dict[fx.Node, int] = {}
    for index, gradients in enumerate(sets):
        for gradient in gradients:
            if gradient not in elements.number:
                raise OptimizerSplitError(f"gradient %{gradient} is not a node of this graph")
            if seen.setdefault(gradient, index) != index:
                raise OptimizerSplitError(
                    f"gradient %{gradient.name} is in sets {seen[gradient]} and {index}"
                )
