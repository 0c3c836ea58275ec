"""The step counter of an optimizer, and how the results of list operators reach their state."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta, is_operator
from graphopt.ir.operators import fused_optimizer, is_list_operator
from graphopt.optim.lists import OptimizerSplitError, list_argument

aten = torch.ops.aten

Output = fx.Node | None
"""The `copy_` of one entry; None where the graph does not copy it back."""


@dataclass
class ForeachAddBlock:
    """The list operator that counts the steps of an optimizer.

    Attributes:
        add_node: the `_foreach_add`.
        outputs: per entry the `copy_` that stores the new count.

    >>> (block,) = graphopt.optim.get_all_fused_optimizer_blocks(gm)
    >>> len(block.step.outputs)
    2
    """

    add_node: fx.Node
    outputs: list[Output]

    @classmethod
    def from_node(cls, add_node: fx.Node) -> ForeachAddBlock:
        """The block around a `_foreach_add`, as the graph has it."""
        if not is_operator(add_node.target, "aten::_foreach_add"):
            raise OptimizerSplitError(f"not a _foreach_add: {add_node.format_node()}")
        return cls(add_node, find_outputs(add_node, entries_of(add_node, "self")))

    @classmethod
    def with_new_outputs(cls, add_node: fx.Node) -> ForeachAddBlock:
        """The block around a new `_foreach_add`: inserts what copies its results back."""
        return cls(add_node, make_outputs(add_node, add_node, entries_of(add_node, "self")))

    @property
    def copies(self) -> list[fx.Node]:
        """The outputs that there are."""
        return [output for output in self.outputs if output is not None]


def entries_of(node: fx.Node, name: str) -> list[fx.Node]:
    """The nodes in a list argument of a list operator."""
    entries = list_argument(node, name) or []
    return [entry for entry in entries if isinstance(entry, fx.Node)]


def items_by_index(container: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The nodes that pick an item of `container`, with its index."""
    for user in container.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            yield user.args[1], user


def copy_of(item: fx.Node) -> Output:
    """The `copy_` that stores `item`."""
    for user in item.users:
        if is_operator(user.target, "aten::copy_") and user.args[1] is item:
            return user
    return None


def find_outputs(container: fx.Node, entries: list[fx.Node]) -> list[Output]:
    """Per entry the `copy_` that stores the item of the same index."""
    found: list[Output] = [None] * len(entries)
    for index, item in items_by_index(container):
        if index < len(found):
            found[index] = found[index] or copy_of(item)
    return found


def make_outputs(container: fx.Node, after: fx.Node, entries: list[fx.Node]) -> list[Output]:
    """Insert getitem -> copy_ for each entry, behind `after`."""
    made: list[Output] = []
    graph = container.graph
    for index, entry in enumerate(entries):
        with graph.inserting_after(after):
            item = call_function_with_meta(
                graph, operator.getitem, (container, index), like=container
            )
        with graph.inserting_after(item):
            after = call_function_with_meta(
                graph, aten.copy_.default, (_state_behind(entry), item), like=container
            )
        made.append(after)
    return made


def _state_behind(entry: fx.Node) -> fx.Node:
    """The state that an entry holds: what is copied over is not the result of a `copy_`."""
    while is_operator(entry.target, "aten::copy_") and isinstance(entry.args[0], fx.Node):
        entry = entry.args[0]
    return entry


def find_list(node: fx.Node, position: int) -> fx.Node | None:
    """The node that holds one of several lists of results."""
    return next((user for index, user in items_by_index(node) if index == position), None)


def is_list_optimizer(node: fx.Node) -> bool:
    """Whether a node is a fused optimizer, in place or not."""
    return is_list_operator(node) and fused_optimizer(node.target) is not None
