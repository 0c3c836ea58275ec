"""A dependency graph whose vertices are nodes and single entries of list operators.

`Elements` numbers everything that a graph computes: a node, or one entry of a list operator that
can be divided. The nodes that pick an entry have the number of that entry. An element only depends
on elements with lower numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import fx

from graphopt.ir.entries import ListCall, list_call
from graphopt.ir.memory_readers import values_read
from graphopt.ir.metadata import input_kind, known_value
from graphopt.ir.operators import operator_of, writers, written
from graphopt.ir.views import reads_through_views

NONE = -1
"""The owner of elements that belong to no set."""


class Origin(IntEnum):
    """The kind of data that an element is computed from; the highest among its inputs."""

    CONSTANT = 0
    """Hyperparameters, and state that the graph does not update."""
    STATE = 1
    """State that the graph updates: parameters, moments, step counters."""
    DATA = 2
    """The batch, gradients, random numbers, other ranks."""


class Elements:
    """The elements of one graph, and the elements that each depends on.

    Attributes:
        number: of every node but the output; of a list operator, that of its first entry.
        nodes: the node that computes each element.
        inputs: the elements that each element reads. `copy_` does not read its destination.
        origins: one `Origin` per element.
        lists: the list operators whose entries are elements.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.number: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        self.inputs: list[list[int]] = []
        self.origins: list[Origin] = []
        self.lists: dict[fx.Node, ListCall] = {}
        self._updated = {state for node in writers(graph) for state in written(node)}
        for node in graph.nodes:
            if node not in self.number and node.op != "output":
                self._add(node)

    def __len__(self) -> int:
        return len(self.nodes)

    def of(self, node: fx.Node) -> range:
        """Returns the elements that a node computes."""
        first, call = self.number[node], self.lists.get(node)
        return range(first, first + (1 if call is None else call.count))

    def given(self, element: int) -> list[fx.Node]:
        """Returns the nodes that an element reads or overwrites."""
        node = self.nodes[element]
        call = self.lists.get(node)
        return node.all_input_nodes if call is None else call.given(element - self.number[node])

    def readers(self, node: fx.Node) -> Iterator[int]:
        """Yields the elements that receive a node's storage, directly or through views."""
        for source, reader in reads_through_views(node):
            first, call = self.number[reader], self.lists.get(reader)
            yield from [first] if call is None else [first + item for item in call.readers[source]]

    def groups(self, node: fx.Node, owners: Sequence[int]) -> dict[int, list[int]]:
        """Groups the entries of a list operator by owner, `NONE` last.

        Args:
            owners: of each element of the graph.
        """
        found: dict[int, list[int]] = {}
        for item, element in enumerate(self.of(node)):
            found.setdefault(owners[element], []).append(item)
        return {owner: found[owner] for owner in sorted(found, key=lambda o: (o == NONE, o))}

    def _add(self, node: fx.Node) -> None:
        first = self.number[node] = len(self.nodes)
        call = list_call(node)
        if call is None or not call.can_be_divided:
            self._append(node, values_read(node))
            return
        self.lists[node] = call
        for item in range(call.count):
            self._append(node, call.given(item))
        for container in call.containers():
            self.number[container] = first
            for picked in container.users:
                self.number[picked] = first + picked.args[1]  # type: ignore[assignment, operator]

    def _append(self, node: fx.Node, sources: list[fx.Node]) -> None:
        inputs = [self.number[source] for source in sources]
        self.nodes.append(node)
        self.inputs.append(inputs)
        self.origins.append(self._origin(node, inputs))

    def _origin(self, node: fx.Node, inputs: list[int]) -> Origin:
        if node.op == "placeholder":
            return self._origin_of_input(node)
        known = operator_of(node)
        if known.collective or known.wait or known.random:
            return Origin.DATA
        return max((self.origins[source] for source in inputs), default=Origin.CONSTANT)

    def _origin_of_input(self, node: fx.Node) -> Origin:
        kind = input_kind(node)
        if kind in ("user_input", "gradient"):
            return Origin.DATA
        if node in self._updated:
            return Origin.STATE
        if kind is not None or _is_number(node):
            return Origin.CONSTANT
        return Origin.DATA


def _is_number(node: fx.Node) -> bool:
    """True if a placeholder of unknown kind can only be a hyperparameter."""
    value = known_value(node)
    return not isinstance(value, torch.Tensor) or value.dim() == 0
