"""The entries of list operators, and how a call is divided between them.

    a, b = _foreach_mul([x, y], [z, w], 2)     entry 0 reads x, z and 2; entry 1 reads y, w and 2

`_foreach_*`, the fused optimizers and coalesced collectives do the same for each entry of their
lists, and entries do not depend on one another. So whoever asks what reads, writes or follows from
what asks for entries, and a call can be divided into several without a change in any bit.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import (
    argument_at,
    is_list_of_tensors,
    nodes_in,
    operator_of,
    written_positions,
)


class Entry(NamedTuple):
    """A value that a node computes or writes. `item`: the index of the entry, for list
    operators."""

    node: fx.Node
    item: int | None = None


@dataclass(eq=False)
class ListCall:
    """A call of a list operator, in place or not, as a row of independent entries.

    Attributes:
        node: the call.
        count: number of entries.
        lists: by position in the schema, the arguments with one value for each entry: a list, or a
            node whose value is one.
    """

    node: fx.Node
    count: int
    lists: dict[int, Any]

    @cached_property
    def shared(self) -> list[fx.Node]:
        """Returns the argument nodes that all entries have in common."""
        others = (value for position, value in _given(self.node) if position not in self.lists)
        return [node for value in others for node in nodes_in(value)]

    def reads(self, item: int) -> list[tuple[fx.Node, int | None]]:
        """Returns the inputs of one entry alone: (node, None), or (node, index) of a list-valued
        node."""
        values = self.lists.items()
        return [each for position, value in values for each in self._in(position, value, item)]

    def needs(self, item: int, names: Collection[str]) -> list[tuple[fx.Node, int | None]]:
        """Returns the inputs of one entry among the named arguments, as `reads` does; those of
        shared arguments are without an index."""
        schema = _compat.schema_of(self.node.target).arguments
        values = [(at, value) for at, value in _given(self.node) if schema[at].name in names]
        return [each for position, value in values for each in self._in(position, value, item)]

    def _in(self, position: int, value: Any, item: int) -> Iterator[tuple[fx.Node, int | None]]:
        """Yields the inputs of one entry in an argument."""
        if position in self.lists and isinstance(value, fx.Node):
            yield value, item
        else:
            own = value[item] if position in self.lists else value
            yield from ((node, None) for node in nodes_in(own))

    def given(self, item: int) -> list[fx.Node]:
        """Returns the input nodes of one entry, the shared ones last."""
        return [node for node, _ in self.reads(item)] + self.shared

    @cached_property
    def readers(self) -> dict[fx.Node, Sequence[int]]:
        """Maps each input node to the entries that read it."""
        found: dict[fx.Node, list[int]] = {}
        for item in range(self.count):
            for node, _ in self.reads(item):
                found.setdefault(node, []).append(item)
        return {**found, **dict.fromkeys(self.shared, range(self.count))}

    def writes(self, item: int) -> list[fx.Node]:
        """Returns the nodes that one entry updates in place."""
        values = (v if isinstance(v, fx.Node) else v[item] for v in self._updated)
        return [node for value in values for node in nodes_in(value)]

    @cached_property
    def _updated(self) -> list[Any]:
        """Returns the lists that the call updates in place."""
        positions = written_positions(self.node)
        return [self.lists[position] for position in positions if position in self.lists]

    @property
    def several(self) -> bool:
        """True if the call returns several lists, as fused optimizers do, instead of one."""
        return len(operator_of(self.node).aliases) > 1

    def results(self, number: int = 0) -> dict[int, list[fx.Node]]:
        """Maps each entry to the nodes that pick its value from result list `number`."""
        found: dict[int, list[fx.Node]] = {}
        for container in self.containers():
            if not self.several or container.args[1] == number:
                for user in container.users:
                    if _picks(user, self.count):
                        found.setdefault(cast(int, user.args[1]), []).append(user)
        return found

    def containers(self) -> list[fx.Node]:
        """Returns the nodes that hold a list of results."""
        return [user for user in self.node.users if _picks(user)] if self.several else [self.node]

    @property
    def read_by_entry(self) -> bool:
        """True if every reader of the results picks the result of one entry."""
        if self.several and not all(map(_picks, self.node.users)):
            return False
        return all(_picks(user, self.count) for c in self.containers() for user in c.users)

    @property
    def can_be_divided(self) -> bool:
        """True if the call is functional, read by entry, and has no argument (such as a vector of
        numbers) that holds values of several entries."""
        if operator_of(self.node).writes or not _returns_lists(self.node.target):
            return False
        if any(isinstance(value, fx.Node) for value in self.lists.values()):
            return False
        if any(_holds_several(known_value(node)) for node in self.shared):
            return False
        return self.read_by_entry


def list_call(node: fx.Node) -> ListCall | None:
    """Returns a call of a list operator as a row of entries. None for other nodes, and where it is
    unknown which elements of its lists belong together.

    >>> from graphopt.graph_utils import find_nodes, is_list_operator
    >>> from graphopt.ir.entries import list_call
    >>> calls = map(list_call, find_nodes(gm.graph, is_list_operator))
    >>> [(call.node, call.count, call.can_be_divided) for call in calls]
    [(_foreach_add, 2, True), (_fused_adam, 2, True)]
    """
    if not operator_of(node).listed:
        return None
    lists: dict[int, Any] = {}
    count = 0
    for position in list_positions(node.target):
        value = argument_at(node, position)
        length = _length(value)
        if length and count not in (0, length):
            return None
        if length:
            lists[position], count = value, length
    return ListCall(node, count, lists) if 0 in lists else None


def divide(call: ListCall, groups: Sequence[Sequence[int]]) -> list[list[fx.Node]]:
    """Replaces a call by one call for each group of its entries.

    Args:
        call: one that can be divided; it leaves its graph.
        groups: each entry in one of them.

    Returns:
        Per group the new nodes, in graph order: the call, and what holds its lists of results.
    """
    graph, node, containers = call.node.graph, call.node, call.containers()
    new: list[list[fx.Node]] = []
    place: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        with graph.inserting_before(node):
            part = graph.call_function(cast(Any, node.target), *_arguments_of(call, group))
        part.meta = {**node.meta, "val": _value_of(call, group)}
        new.append([part])
        place.update({item: (number, index) for index, item in enumerate(group)})
    for container in containers:
        parts = _parts(container, new) if call.several else [nodes[0] for nodes in new]
        for picked in list(container.users):
            number, index = place[cast(int, picked.args[1])]
            picked.args = (parts[number], index)
        if call.several:
            graph.erase_node(container)
    graph.erase_node(node)
    return new


def _parts(container: fx.Node, new: list[list[fx.Node]]) -> list[fx.Node]:
    """Returns, for each new call, the node that holds the results which `container` held."""
    number = cast(int, container.args[1])
    for nodes in new:
        with container.graph.inserting_before(container):
            part = container.graph.call_function(operator.getitem, (nodes[0], number))
        part.meta = {**container.meta, "val": fake_value(nodes[0])[number]}
        nodes.append(part)
    return [nodes[-1] for nodes in new]


def _arguments_of(call: ListCall, group: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call for some of the entries."""
    given = [
        [call.lists[position][item] for item in group] if position in call.lists else value
        for position, value in _given(call.node)
    ]
    count = len(call.node.args)
    return tuple(given[:count]), dict(zip(call.node.kwargs, given[count:], strict=True))


def _value_of(call: ListCall, group: Sequence[int]) -> Any:
    """Returns `meta["val"]` of a call for some of the entries, selected from the whole call's,
    which is faster than computing it."""
    whole = fake_value(call.node)
    if not call.several:
        return [whole[item] for item in group]
    return tuple([results[item] for item in group] if results else [] for results in whole)


def _given(node: fx.Node) -> Iterator[tuple[int, Any]]:
    """Yields the arguments of a call with their positions in the schema."""
    yield from enumerate(node.args)
    for name, value in node.kwargs.items():
        yield _positions(node.target)[name], value


# Schemas are slow to read, and graphs have many calls of few operators.


@lru_cache(maxsize=4096)
def _positions(target: Any) -> dict[str, int]:
    """Maps the names of an operator's arguments to their positions."""
    arguments = _compat.schema_of(target).arguments
    return {argument.name: index for index, argument in enumerate(arguments)}


@lru_cache(maxsize=4096)
def _returns_lists(target: Any) -> bool:
    """True if an operator returns lists of tensors, and nothing else."""
    return all(is_list_of_tensors(result.type) for result in _compat.schema_of(target).returns)


@lru_cache(maxsize=4096)
def list_positions(target: Any) -> tuple[int, ...]:
    """Returns the positions of an operator's list arguments."""
    kinds = enumerate(argument.type for argument in _compat.schema_of(target).arguments)
    return tuple(position for position, kind in kinds if isinstance(kind, torch.ListType))


def _length(value: Any) -> int:
    """Returns the length of a list, or of the list that a node holds."""
    if isinstance(value, fx.Node):
        value = known_value(value)
    return len(value) if isinstance(value, (list, tuple)) else 0


def _holds_several(value: Any) -> bool:
    """True if an argument may hold a value for each entry."""
    return isinstance(value, (list, tuple)) or (
        isinstance(value, torch.Tensor) and value.numel() > 1
    )


def _picks(node: fx.Node, count: int | None = None) -> bool:
    """True if a node picks one item by index, from a list of `count`."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    return node.args[1] >= 0 and (count is None or node.args[1] < count)
