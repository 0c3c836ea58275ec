"""Values that cross from one graph of a stage to a later one."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from graphopt.graph_utils import is_random, is_view, may_alias, written


@dataclass
class Crossing:
    """Values that one graph computes and a later one needs.

    Attributes:
        slots: each value, as the later graph reads it, with its position among the kept values.
        kept: what the earlier graph returns for them.
    """

    slots: dict[fx.Node, int] = field(default_factory=dict)
    kept: list[fx.Node] = field(default_factory=list)

    def add(self, value: fx.Node, kept: fx.Node) -> None:
        """Keep `value`, for which the earlier graph returns `kept`."""
        self.slots[value] = len(self.slots)
        self.kept.append(kept)


def closure(roots: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """`roots` and all that they need, without what is in `stop`."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found and node not in stop:
            found.add(node)
            pending += node.all_input_nodes
    return found


def find_crossing(
    roots: Iterable[fx.Node], early: Collection[fx.Node], slots: Collection[fx.Node] = ()
) -> Iterator[fx.Node]:
    """What `roots` need of what is computed `early`, views aside.

    Args:
        slots: what is kept already.
    """
    pending, seen = list(roots), set(slots)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in early and not _is_free(node):
            yield node
        else:
            pending += reversed(node.all_input_nodes)


def with_items(nodes: set[fx.Node]) -> Iterator[fx.Node]:
    """`nodes` and the items of those that compute several values."""
    yield from nodes
    for node in nodes:
        if isinstance(node.meta.get("val"), (list, tuple)):
            yield from (user for user in node.users if user.target is operator.getitem)


def _is_free(node: fx.Node) -> bool:
    """Whether a value costs nothing to make again: views, and constants of the module."""
    if node.op == "get_attr":
        return True
    if node.target is operator.getitem:
        source = node.all_input_nodes[0]
        return is_view(source)
    if isinstance(node.meta.get("val"), (list, tuple)):
        return is_view(node)
    return node.op == "call_function" and may_alias(node) and not written(node)


def value_names(graph: fx.Graph, nodes: Collection[fx.Node]) -> dict[fx.Node, str]:
    """A name for each placeholder and for each of `nodes`, which says how it is computed: in two
    captures of the same function, nodes of one name have the same value."""
    names: dict[fx.Node, str] = {}
    numbers: dict[str, str] = {}
    draws = 0
    for position, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            names[node] = f"%input{position}"
        elif node.op == "get_attr":
            names[node] = f"%{node.target}"
        elif node in nodes:
            arguments = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            draws += is_random(node)
            text = f"{node.target}{arguments}{draws if is_random(node) else ''}"
            names[node] = numbers.setdefault(text, f"%{len(numbers)}")
    return names
