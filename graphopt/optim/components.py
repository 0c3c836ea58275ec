"""Which elements of a graph update the parameters of which gradients.

Given disjoint sets of gradients, `UpdateComponents` assigns each element of the graph to at most
one of them. To a set belongs

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

from graphopt.graph_utils import Outputs, get_outputs, is_operator
from graphopt.optim.elements import Elements, Origin

NONE, MIXED = -1, -2
"""No set; and, of what reads an element: several sets, or something of no set."""


class UpdateComponents:
    """The elements of a graph by the set of gradients that they belong to. Linear in their number.

    Args:
        elements: of the graph.
        sets: disjoint sets of nodes that hold gradients.
    """

    def __init__(
        self, graph: fx.Graph, elements: Elements, sets: Sequence[Sequence[fx.Node]]
    ) -> None:
        self._elements = elements
        self._outputs = get_outputs(graph)
        self._copies = list(_final_copies(graph, self._outputs))
        self._parent = list(range(len(sets)))
        self._starts = [NONE] * len(elements)
        self._sets = [NONE] * len(elements)
        self.meetings: dict[frozenset[int], fx.Node] = {}
        for index, gradients in enumerate(sets):
            for gradient in gradients:
                self._start(elements.element(gradient), index, gradient)
        self._follow()
        self._gather()
        while self._claim_unread_updates():
            self._gather()

    def root(self, index: int) -> int:
        """One set for all that are entangled with set `index`."""
        while self._parent[index] != index:
            self._parent[index] = self._parent[self._parent[index]]
            index = self._parent[index]
        return index

    def set_of(self, element: int) -> int:
        """The set that an element belongs to, after `root`, or `NONE`."""
        found = self._sets[element]
        return found if found < 0 else self.root(found)

    def _join(self, a: int, b: int, where: fx.Node) -> int:
        """Of two sets, `NONE` among them, the one that they become."""
        if a < 0 or b < 0:
            return max(a, b)
        a, b = self.root(a), self.root(b)
        if a != b:
            self.meetings.setdefault(frozenset((a, b)), where)
            self._parent[max(a, b)] = min(a, b)
        return min(a, b)

    def _start(self, element: int, index: int, gradient: fx.Node) -> None:
        """Note a gradient; two nodes may pick one entry of a list."""
        self._starts[element] = self._join(self._starts[element], index, gradient)

    def _follow(self) -> None:
        """Assign what depends on gradients."""
        sets, starts = self._sets, self._starts
        for element, inputs in enumerate(self._elements.inputs):
            found = NONE
            for source in inputs:
                for other in (sets[source], starts[source]):
                    if other != found and other >= 0:
                        found = self._join(found, other, self._elements.nodes[element])
            sets[element] = found
            if found >= 0 and starts[element] >= 0:
                self._join(found, starts[element], self._elements.nodes[element])

    def _gather(self) -> None:
        """Assign what exists for the elements of one set alone, and the copies of all."""
        readers = [NONE] * len(self._elements)
        for value in self._outputs.results:
            if isinstance(value, fx.Node):
                readers[self._elements.element(value)] = MIXED
        unread = {self._elements.element(copy) for copy in self._copies}
        for element in range(len(self._elements) - 1, -1, -1):
            found = self.set_of(element)
            if found == NONE and readers[element] >= 0 and self._may_belong(element):
                found = self._sets[element] = readers[element]
            if found == NONE and element in unread:
                continue
            reader = MIXED if found == NONE else found
            for source in self._elements.inputs[element]:
                known = readers[source]
                readers[source] = reader if known in (NONE, reader) else MIXED
        self._readers = readers
        for copy in self._copies:
            element = self._elements.element(copy)
            for source in self._elements.inputs[element]:
                if self._sets[element] == NONE:
                    self._sets[element] = self._sets[source]

    def _may_belong(self, element: int) -> bool:
        if self._starts[element] != NONE or self._elements.nodes[element].op != "call_function":
            return False
        origin = self._elements.origins[element]
        if origin is Origin.CONSTANT:
            return self._elements.is_entry(element)
        return origin is Origin.STATE

    def _claim_unread_updates(self) -> bool:
        """Assign new state that only its `copy_` reads, but whose old value one set reads.

        The copy must not happen before that read.
        """
        readers: dict[int, int] = {}
        waiting = {}
        for copy in self._copies:
            element = self._elements.element(copy)
            for source in self._elements.inputs[element]:
                free = self._sets[source] == NONE and self._readers[source] == NONE
                if free and self._sets[element] == NONE and self._may_belong(source):
                    assert isinstance(copy.args[0], fx.Node)
                    waiting[self._elements.element(copy.args[0])] = source
        if not waiting:
            return False
        for element, inputs in enumerate(self._elements.inputs):
            found = self.set_of(element)
            for state in inputs if found >= 0 else ():
                if state in waiting:
                    where = self._elements.nodes[element]
                    readers[state] = self._join(readers.get(state, NONE), found, where)
        for state, found in readers.items():
            self._sets[waiting[state]] = found
        return bool(readers)


def _final_copies(graph: fx.Graph, outputs: Outputs) -> Iterator[fx.Node]:
    """The copies into state that nothing in the graph reads afterwards."""
    returned = {value for value in outputs.results if isinstance(value, fx.Node)}
    for node in graph.nodes:
        if not is_operator(node.target, "aten::copy_") or node in returned:
            continue
        if all(user.op == "output" for user in node.users):
            yield node
