"""The descendants of gradients: the nodes and list entries that update the parameters of each set.

Given disjoint sets of gradients, each element of the graph belongs to at most one of them. To a set
belongs

1. what depends on its gradients,
2. what is computed from state for such elements alone: a step counter, a decayed moment,
3. the `copy_` that stores any of these.

Values computed from hyperparameters alone belong to no set, and neither does what several sets or
something else in the graph need as well. Where an element depends on gradients of several sets, as
with clipping by the norm of all, these sets are *entangled* and become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from graphopt.ir.operators import is_copy, written
from graphopt.ir.outputs import get_outputs
from graphopt.optim.elements import NONE, Elements, Origin
from graphopt.optim.errors import OptimizerSplitError

MIXED = -2
"""The owner of an element that several sets read, or something outside all sets."""


class Descendants:
    """Assigns each element of a graph to the set of gradients it serves, in linear time.

    Args:
        sets: disjoint sets of nodes that hold gradients.

    Attributes:
        elements: of the graph, which stays as it is.
        owners: the set that each element belongs to, of those entangled the first; or `NONE`.
        meetings: the first element found to entangle two sets, of each pair.

    Raises:
        OptimizerSplitError: a set holds what is no node of the graph, sets overlap, or an operator
            that belongs to one works in place.
    """

    def __init__(self, graph: fx.Graph, sets: Sequence[Sequence[fx.Node]]) -> None:
        self.elements = Elements(graph)
        _check_gradients(self.elements, sets)
        self.meetings: list[fx.Node] = []
        self._graph = graph
        self._copies = {self.elements.number[copy]: copy for copy in _final_copies(graph)}
        self._entangled = list(range(len(sets)))
        self._sets = [NONE] * len(self.elements)
        self._starts: dict[int, int] = {}
        for index, gradients in enumerate(sets):
            for gradient in gradients:  # of which two may pick one entry of a list
                element = self.elements.number[gradient]
                self._starts[element] = self._join(self._starts.get(element, NONE), index, gradient)
        self._assign_dependents()
        self._assign_exclusive_inputs()
        while self._claim_unread_updates():
            self._assign_exclusive_inputs()
        self._refuse_in_place()
        self.owners = [self._set_of(element) for element in range(len(self.elements))]

    def root(self, index: int) -> int:
        """Returns the first of all gradient sets that must stay together with set `index`."""
        while self._entangled[index] != index:
            self._entangled[index] = self._entangled[self._entangled[index]]
            index = self._entangled[index]
        return index

    def _set_of(self, element: int) -> int:
        found = self._sets[element]
        return found if found < 0 else self.root(found)

    def _join(self, a: int, b: int, where: fx.Node) -> int:
        """Merges two sets (or `NONE`) and returns the result."""
        if a < 0 or b < 0:
            return max(a, b)
        a, b = self.root(a), self.root(b)
        if a != b:
            self.meetings.append(where)
            self._entangled[max(a, b)] = min(a, b)
        return min(a, b)

    def _assign_dependents(self) -> None:
        """Assigns the elements that depend on gradients."""
        sets, starts = self._sets, self._starts
        for element, inputs in enumerate(self.elements.inputs):
            found, node = NONE, self.elements.nodes[element]
            for source in inputs:
                other = starts.get(source, sets[source])
                if other != found and other >= 0:
                    found = self._join(found, other, node)
            sets[element] = found
            if found >= 0 and element in starts:
                self._join(found, starts[element], node)

    def _assign_exclusive_inputs(self) -> None:
        """Assigns the elements that only one set reads, and all copies into state."""
        readers = [NONE] * len(self.elements)
        for value in get_outputs(self._graph).results:
            if isinstance(value, fx.Node):
                readers[self.elements.number[value]] = MIXED
        for element in range(len(self.elements) - 1, -1, -1):
            found = self._set_of(element)
            if found == NONE and readers[element] >= 0 and self._may_belong(element):
                found = self._sets[element] = readers[element]
            if found == NONE and element in self._copies:
                continue
            reader = MIXED if found == NONE else found
            for source in self.elements.inputs[element]:
                known = readers[source]
                readers[source] = reader if known in (NONE, reader) else MIXED
        self._readers = readers
        for element in self._copies:
            stored = (element, *self.elements.inputs[element])
            self._sets[element] = next((s for e in stored if (s := self._sets[e]) != NONE), NONE)

    def _may_belong(self, element: int) -> bool:
        node = self.elements.nodes[element]
        if element in self._starts or node.op != "call_function":
            return False
        origin = self.elements.origins[element]
        return origin is Origin.STATE or (origin is Origin.CONSTANT and node in self.elements.lists)

    def _claim_unread_updates(self) -> bool:
        """Assigns new state that only its `copy_` reads, but whose old value a set reads.

        The copy must not happen before that read.
        """
        waiting: dict[int, int] = {}
        for element, copy in self._copies.items():
            for source in self.elements.inputs[element]:
                free = self._sets[source] == NONE and self._readers[source] == NONE
                if free and self._sets[element] == NONE and self._may_belong(source):
                    waiting[self.elements.number[copy.args[0]]] = source  # type: ignore[index]
        readers: dict[int, int] = {}
        for element, inputs in enumerate(self.elements.inputs if waiting else ()):
            found = self._set_of(element)
            for state in inputs if found >= 0 else ():
                if state in waiting:
                    where = self.elements.nodes[element]
                    readers[state] = self._join(readers.get(state, NONE), found, where)
        for state, found in readers.items():
            self._sets[waiting[state]] = found
        return bool(readers)

    def _refuse_in_place(self) -> None:
        for found, node in zip(self._sets, self.elements.nodes, strict=True):
            if found != NONE and node.op == "call_function" and not is_copy(node) and written(node):
                raise OptimizerSplitError(
                    f"%{node.name} updates its arguments in place, so that the updates cannot be"
                    f" told apart\n  > {node.format_node()}"
                )


def _final_copies(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the copies into state that nothing in the graph reads afterwards."""
    returned = {value for value in get_outputs(graph).results if isinstance(value, fx.Node)}
    for node in graph.nodes:
        if is_copy(node) and node not in returned and all(u.op == "output" for u in node.users):
            yield node


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
