"""List operators: calls that apply one computation to each entry of lists of tensors.

`_foreach_*` and the fused optimizers `_fused_*` treat the entries independently, so that a call can
be divided into several, each for some of the entries, without a change in any bit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import GraphOptError
from graphopt.ir.operators import is_list_of_tensors, is_list_operator


class OptimizerSplitError(GraphOptError, ValueError):
    """An optimizer cannot be found or divided as asked.

    >>> from graphopt.optim import OptimizerSplitError
    >>> issubclass(OptimizerSplitError, graphopt.GraphOptError)
    True
    """


@dataclass(frozen=True)
class ListOperator:
    """A functional list operator whose results are all read entry by entry.

    Attributes:
        node: the call.
        length: number of entries.
        several: whether it returns several lists, as fused optimizers do, instead of one.
        lists: names of the arguments that have one entry per tensor, with their entries.
    """

    node: fx.Node
    length: int
    several: bool
    lists: dict[str, Sequence[Any]]

    @property
    def shared(self) -> list[fx.Node]:
        """Nodes among the arguments that all entries have in common."""
        values = (value for name, value in _arguments(self.node) if name not in self.lists)
        return [value for value in values if isinstance(value, fx.Node)]

    def entry(self, index: int) -> list[fx.Node]:
        """Nodes among the arguments of one entry."""
        values = (entries[index] for entries in self.lists.values())
        return [value for value in values if isinstance(value, fx.Node)]

    def select(self, indices: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call for some of the entries."""
        chosen = {
            name: [entries[index] for index in indices] for name, entries in self.lists.items()
        }
        names = [name for name, _ in _arguments(self.node)]
        args = tuple(
            chosen.get(name, value) for name, value in zip(names, self.node.args, strict=False)
        )
        kwargs = {name: chosen.get(name, value) for name, value in self.node.kwargs.items()}
        return args, kwargs

    def value(self, indices: Sequence[int]) -> Any:
        """`meta["val"]` of that call: entries of results do not depend on one another."""
        whole = self.node.meta["val"]
        if not self.several:
            return [whole[index] for index in indices]
        return tuple([part[index] for index in indices] if part else [] for part in whole)

    def containers(self) -> list[fx.Node]:
        """The nodes whose items are entries of results."""
        return list(self.node.users) if self.several else [self.node]

    def items(self) -> Iterator[fx.Node]:
        """The nodes that pick one entry of a result."""
        for container in self.containers():
            yield from container.users


def list_operator(node: fx.Node) -> ListOperator | None:
    """`node` as a list operator; None where it is another call, or is not read entry by entry.

    Raises:
        OptimizerSplitError: it updates its arguments in place.
    """
    schema = list_schema(node)
    if schema is None:
        return None
    if schema.is_mutable:
        raise OptimizerSplitError(
            f"%{node.name} updates lists in place, and only the functional form of"
            f" {schema.name} can be divided\n  > {node.format_node()}"
        )
    lists = _lists(node, schema)
    first = lists.get(schema.arguments[0].name)
    if not first or not all(is_list_of_tensors(result.type) for result in schema.returns):
        return None
    per_entry = {name: entries for name, entries in lists.items() if len(entries)}
    if any(len(entries) != len(first) for entries in per_entry.values()):
        return None
    if any(_holds_one_number_per_entry(value) for _, value in _arguments(node)):
        return None
    found = ListOperator(node, len(first), len(schema.returns) > 1, per_entry)
    if found.several and not all(_picks(user) for user in node.users):
        return None
    return found if all(_picks(item, len(first)) for item in found.items()) else None


def list_schema(node: fx.Node) -> Any | None:
    """The schema of a list operator, in place or not; None for other nodes."""
    return node.target._schema if is_list_operator(node) else None  # type: ignore[union-attr]


def list_argument(node: fx.Node, name: str) -> list[Any] | None:
    """The entries of a list argument; None where the operator has no argument of that name."""
    return next((list(value) for key, value in _arguments(node) if key == name), None)


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    target = node.target
    assert isinstance(target, _compat.OpOverload)
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        yield argument.name, value
    yield from node.kwargs.items()


def _lists(node: fx.Node, schema: Any) -> dict[str, Sequence[Any]]:
    """Arguments that are lists by the schema and in the call, which may also pass a whole node."""
    types = {argument.name: argument.type for argument in schema.arguments}
    return {
        name: value
        for name, value in _arguments(node)
        if isinstance(types[name], torch.ListType) and isinstance(value, (list, tuple))
    }


def _holds_one_number_per_entry(value: Any) -> bool:
    """Some operators take what differs between entries as one vector."""
    if not isinstance(value, fx.Node):
        return False
    held = value.meta.get("val")
    return isinstance(held, (list, tuple)) or (isinstance(held, torch.Tensor) and held.numel() > 1)


def _picks(node: fx.Node, length: int | None = None) -> bool:
    """Whether a node takes one item, of a list of `length`, by its position."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    return node.args[1] >= 0 and (length is None or node.args[1] < length)
