"""Values that cross the boundaries of partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.partition import bound_symbol, free_symbols
from graphopt.partition.assignment import Assignment, Partition
from graphopt.partition.module_attributes import Attributes

VALUE_KEYS = ("val", "example_value")
"""Keys of `meta` for the value of a node: that of `make_fx` and export, and that of Dynamo."""


class Boundaries:
    """The inputs and outputs of partitions, each in the order of first use.

    A partition that reads a tensor with symbolic sizes also takes the placeholders that are these
    sizes, and sizes computed before that it could not read off its inputs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        attributes: Attributes,
        assignment: Assignment,
        order: Sequence[Partition],
    ) -> None:
        self._graph = graph
        self._attributes = attributes
        self._assignment = assignment
        self._rank = {partition: index for index, partition in enumerate(order)}
        self._inputs: dict[Partition, dict[fx.Node, None]] = {p: {} for p in order}
        self._outputs: dict[Partition, dict[fx.Node, None]] = {p: {} for p in order}
        self._constants: dict[Partition, dict[fx.Node, None]] = {p: {} for p in order}
        self._sizes = _sizes_of(graph)

    def find(self, states: Collection[fx.Node]) -> None:
        """Computes the inputs, outputs and constants of all partitions.

        `states` begin and end regions, of which every partition has its own.
        """
        for node, partition in self._assignment.items():
            if node in states:
                continue
            inputs = self._inputs[partition]
            for source in node.all_input_nodes:
                if source not in inputs and self._assignment.get(source) is not partition:
                    self._take(source, partition)
        for node in self._graph.find_nodes(op="output"):
            for source in node.all_input_nodes:
                self._return(source)
        if self._sizes:
            self._take_computed_sizes()
        for partition in self._rank:
            partition.inputs = list(self._inputs[partition])
            partition.outputs = list(self._outputs[partition])
            partition.constants = list(self._constants[partition])

    def _take(self, source: fx.Node, partition: Partition) -> None:
        if self._attributes.holds_module(source):
            self._constants[partition][source] = None
            return
        self._inputs[partition][source] = None
        self._return(source)
        if not self._sizes:
            return
        for symbol in sorted(_symbols(source), key=str):
            size = self._sizes.get(symbol)
            if size is not None and size.op == "placeholder":
                self._inputs[partition][size] = None

    def _return(self, source: fx.Node) -> None:
        producer = self._assignment.get(source)
        if producer is not None:
            self._outputs[producer][source] = None

    def _take_computed_sizes(self) -> None:
        for partition, inputs in self._inputs.items():
            used = {symbol for source in inputs for symbol in _symbols(source)}
            read_off = {symbol for source in inputs for symbol in _plain_sizes(source)}
            for symbol in sorted(used - read_off, key=str):
                size = self._sizes.get(symbol)
                if size is not None and self._is_computed_before(size, partition):
                    self._take(size, partition)

    def _is_computed_before(self, node: fx.Node, partition: Partition) -> bool:
        producer = self._assignment.get(node)
        return producer is not None and self._rank[producer] < self._rank[partition]


def value_of(node: fx.Node) -> Any:
    """Returns a node's fake tensor, symbolic number or nest, or None."""
    return next((node.meta[key] for key in VALUE_KEYS if key in node.meta), None)


def _sizes_of(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Returns the first node that holds each size symbol."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        symbol = bound_symbol(value) if isinstance(value, torch.SymInt) else None
        if symbol is not None:
            found.setdefault(symbol, node)
    return found


def _leaves(node: fx.Node) -> Iterator[torch.Tensor | torch.SymInt]:
    for leaf in _compat.tree_leaves(value_of(node)):
        if isinstance(leaf, (torch.Tensor, torch.SymInt)):
            yield leaf


def _symbols(node: fx.Node) -> set[Any]:
    """Returns the symbols in the sizes of a value."""
    return free_symbols(list(_leaves(node)))


def _plain_sizes(node: fx.Node) -> Iterator[Any]:
    """Yields the sizes of a value that are a single symbol."""
    for leaf in _leaves(node):
        for number in [leaf] if isinstance(leaf, torch.SymInt) else leaf.shape:
            symbol = bound_symbol(number) if isinstance(number, torch.SymInt) else None
            if symbol is not None:
                yield symbol
