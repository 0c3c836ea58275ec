"""Snapshots of a graph module before a pass, for comparison and for restoring."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import fx, nn

from graphopt._compat import graphs
from graphopt.comm import late_nodes
from graphopt.graph_utils import follows_output_convention
from graphopt.ir.metadata import has_value, known_value
from graphopt.iter_graph import IterGraph
from graphopt.iter_graph.graph import empty_like
from graphopt.manager.module_state import HOOKS, ModuleState
from graphopt.runtime.memory import collector_paused
from graphopt.verify.checks.interface import kinds_returned
from graphopt.verify.checks.written_nodes import GivenArgument

_TABLES = ("_modules", "_parameters", "_buffers", *HOOKS)

_PLAIN = (bool, int, float, str)
"""Types of metadata compared by value; others are compared by identity, since comparing tensors
computes."""


class NodeRecord(NamedTuple):
    """The content of a node at one time, from which a copy can be made."""

    content: tuple[Any, ...]
    meta: dict[str, Any]


def noted(node: fx.Node) -> NodeRecord:
    """Records the present content of a node."""
    # as `NodeRecord(...)` does it, without the detour through a function written in Python
    return tuple.__new__(NodeRecord, (graphs.content_of(node), node.meta.copy()))


class Snapshot:
    """The state of a graph module at the time this is created.

    What every node holds is noted at once, and the graph as it was is made of that when somebody
    asks for it: nearly always nobody does.

    Attributes:
        nodes: what each node held, in the order of the graph.
        module_state: what decides what the graph does, and is no part of it.
        late: late nodes, with their destinations.
        placeholders: targets of the placeholders.
        annotated: whether all nodes have metadata.
        functional: whether the graph is in the captured dialect, which updates by `copy_` only.
        kinds_returned: of what kind results and carried values were.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._original = gm.graph
        self._empty = empty_like(gm.graph)
        with collector_paused():
            # Arguments are immutable: a changed node has other argument objects.
            nodes = list(gm.graph.nodes)
            self.nodes = dict(zip(nodes, map(noted, nodes), strict=True))
        self.late = dict(late_nodes(gm.graph))
        self.module_state = ModuleState(gm)
        self.note_attributes()
        self.placeholders = [n.target for n in nodes if n.op == "placeholder"]
        self.kinds_returned = kinds_returned(gm.graph)
        self.functional = follows_output_convention(gm.graph)
        self.annotated = not any(n.op != "output" for n in nodes if not has_value(n))

    def note_attributes(self) -> None:
        """Records the module's state outside the nodes anew."""
        self._modules = {module: _attributes(module) for module in self._gm.modules()}

    @cached_property
    def _copied(self) -> tuple[fx.Graph, Mapping[fx.Node, fx.Node]]:
        # garbage would be looked for, over and over, among growing numbers of new nodes
        with collector_paused():
            copies: dict[fx.Node, fx.Node] = {}
            for node, record in self.nodes.items():
                copies[node] = copy_of(node, record, self._empty, copies.__getitem__)
        for node, destination in self.late.items():
            cast(IterGraph, self._empty).mark_late(copies[node], copies[destination])
        return self._empty, MappingProxyType(copies)

    @property
    def graph(self) -> fx.Graph:
        """A copy of the former graph, late marks included."""
        return self._copied[0]

    @property
    def copies(self) -> Mapping[fx.Node, fx.Node]:
        """Maps former nodes of the graph module to their copies in `graph`."""
        return self._copied[1]

    @property
    def has_same_graph_object(self) -> bool:
        """True if the graph module still has the same graph object."""
        return self._gm.graph is self._original

    @property
    def correspondence(self) -> dict[fx.Node, fx.Node] | None:
        """Maps nodes of the graph module to their former selves; None if it has another graph
        object."""
        return dict(self.copies) if self.has_same_graph_object else None

    def unchanged(self) -> bool:
        """True if nodes, arguments, metadata and late marks are all unchanged."""
        graph = self._gm.graph
        if graph is not self._original or len(graph.nodes) != len(self.nodes):
            return False
        if late_nodes(graph) != self.late:
            return False
        content_of = graphs.content_of
        for node, (old, (content, meta)) in zip(graph.nodes, self.nodes.items(), strict=True):
            if node is not old or not _same(content_of(node), content):
                return False
            if not _same_meta(node.meta, meta):
                return False
        return True

    def was(self, node: fx.Node) -> fx.Node | None:
        """Returns a node's former self: the same object or, in another graph object, the node of
        that name. None if it is new."""
        if self.has_same_graph_object:
            return node if node in self.nodes else None
        return self._by_name.get(node.name)

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {record.content[0]: node for node, record in self.nodes.items()}

    def _in_names(self, content: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a node's content with names in place of nodes."""
        name, target, *given = content

        def named(source: fx.Node) -> Any:
            return f"%{self.nodes[source].content[0] if source in self.nodes else source.name}"

        return name, target, *fx.node.map_arg(tuple(given), named)

    def new_nodes(self) -> Iterable[fx.Node]:
        """Returns the nodes that the snapshot does not have."""
        return [node for node in self._gm.graph.nodes if self.was(node) is None]

    def changed_nodes(self) -> list[tuple[fx.Node, Any]]:
        """Returns nodes with another target, arguments or `meta["val"]`, each with the former
        `meta["val"]`."""
        found, by_name = [], not self.has_same_graph_object
        for node in self._gm.graph.nodes:
            old = self.was(node)
            if old is None:
                continue
            content, meta = self.nodes[old]
            now, value = graphs.content_of(node), meta.get("val")
            if by_name:
                now, content = self._in_names(now), self._in_names(content)
            same = node.op == old.op and known_value(node) is value
            if not (same and _same(now, content)):
                found.append((node, value))
        return found

    def former_arguments(self, node: fx.Node) -> Any:
        """Returns a node's former target, positional and keyword arguments."""
        _, target, args, kwargs = self.nodes[cast(fx.Node, self.was(node))].content

        def given(source: fx.Node) -> Any:
            return GivenArgument(known_value(self.nodes[source]))

        return target, *fx.node.map_arg((args, kwargs), given)

    def restore(self) -> None:
        """Restores the graph module; its nodes are then the copies."""
        for module, attributes in self._modules.items():
            _restore_attributes(module, attributes)
        self.module_state.restore()
        self._gm.graph = self.graph


def copy_of(
    node: fx.Node, held: NodeRecord, graph: fx.Graph, value_of: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Appends a copy of a former node to another graph."""
    return graphs.copy_node(graph, node, value_of, (*held.content, held.meta))


def _same(content: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """True if two contents are equal in value and type: 0.0 and -0.0 differ, as do 1 and True."""
    a, b, c, d = content
    w, x, y, z = other
    if a is w and b is x and c is y and d is z:
        return True
    return all(
        a is b or (a == b and repr(a) == repr(b)) for a, b in zip(content, other, strict=True)
    )


def _same_meta(meta: dict[str, Any], other: dict[str, Any]) -> bool:
    if meta.keys() != other.keys():
        return False
    return all(map(operator.is_, meta.values(), other.values())) or all(
        meta[key] is value or (type(value) in _PLAIN and meta[key] == value)
        for key, value in other.items()
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    attributes = dict(vars(module))
    copied = {name: dict(attributes[name]) for name in (*_TABLES, "meta") if name in attributes}
    return {**attributes, **copied}


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    current = vars(module)
    for table in _TABLES:
        current[table].clear()
        current[table].update(attributes[table])
    for name in current.keys() - attributes.keys():
        del current[name]
    current.update({k: v for k, v in attributes.items() if k not in _TABLES})
