"""A graph module as it is before a pass, to compare with and to return to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from graphopt.iter_graph import IterGraph, copy_graph
from graphopt.runtime.collector import collector_paused
from graphopt.verify import Problem
from graphopt.verify.equivalence import attribute

_TABLES = ("_modules", "_parameters", "_buffers")

_PLAIN = (bool, int, float, str)
"""Types of metadata that are compared by value; all others by identity, since to compare tensors
would compute."""


class Snapshot:
    """The state of a graph module when this is made.

    Attributes:
        graph: a copy of the graph, late marks included.
        copies: node of the graph module -> its copy in `graph`.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._original = gm.graph
        # garbage would be looked for, over and over, among growing numbers of new nodes
        with collector_paused():
            self.graph, copies = copy_graph(gm.graph)
            # Arguments are immutable: a changed node has other argument objects.
            self._nodes = [(node, _content(node), dict(node.meta)) for node in gm.graph.nodes]
        self.copies: Mapping[fx.Node, fx.Node] = MappingProxyType(copies)
        self._late = _late(gm.graph)
        self._constants = {str(n.target): _content_of(gm, n) for n in _attributes_read(gm)}
        self.note_attributes()
        self.placeholders = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
        self.annotated = all("val" in n.meta for n in gm.graph.nodes if n.op != "output")

    def note_attributes(self) -> None:
        """Take what the module and its submodules hold besides the graph as it is now."""
        self._modules = {module: _attributes(module) for module in self._gm.modules()}

    @property
    def correspondence(self) -> dict[fx.Node, fx.Node] | None:
        """Node of the graph module -> what it was before; None if its graph is another one."""
        return dict(self.copies) if self._gm.graph is self._original else None

    def unchanged(self) -> bool:
        """Whether the graph is still the same: nodes, arguments, metadata, late marks."""
        graph = self._gm.graph
        if graph is not self._original or len(graph.nodes) != len(self._nodes):
            return False
        return _late(graph) == self._late and all(
            node is old and _same(_content(node), content) and _same_meta(node.meta, meta)
            for node, (old, content, meta) in zip(graph.nodes, self._nodes, strict=True)
        )

    def new_nodes(self) -> Iterable[fx.Node]:
        """Nodes that were not there."""
        return [node for node in self._gm.graph.nodes if node not in self.copies]

    def changed_nodes(self) -> list[tuple[fx.Node, Any]]:
        """Nodes with another operator, other arguments or another `meta["val"]`, and what the
        latter was."""
        there = set(self._gm.graph.nodes)
        return [
            (node, meta.get("val"))
            for node, content, meta in self._nodes
            if node in there
            and (not _same(_content(node), content) or node.meta.get("val") is not meta.get("val"))
        ]

    def edited_nodes(self) -> list[fx.Node]:
        """`changed_nodes`, and nodes that are late now or no longer."""
        late = _late(self._gm.graph)
        changed = {node for node, _ in self.changed_nodes()}
        return [
            node
            for node, _, _ in self._nodes
            if node in changed or late.get(node) is not self._late.get(node)
        ]

    def changed_constants(self) -> list[Problem]:
        """Constants of the module that stand behind their names no longer."""
        return [
            Problem(
                f"the constant {node.target} of the module is another one, or was changed",
                (node,),
                hint="give a new constant a name of its own",
            )
            for node in _attributes_read(self._gm)
            if str(node.target) in self._constants
            and _content_of(self._gm, node) != self._constants[str(node.target)]
        ]

    def restore(self) -> None:
        """Make the graph module what it was. Its nodes are then the copies."""
        for module, attributes in self._modules.items():
            _restore_attributes(module, attributes)
        self._gm.graph = self.graph


def _attributes_read(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "get_attr"]


def _content_of(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """What tells an attribute from another one: tensors count their updates."""
    found = attribute(gm, node)
    if isinstance(found, torch.Tensor):
        return _Same(found), found._version
    return _Same(found), str(found.graph) if isinstance(found, fx.GraphModule) else None


class _Same:
    """An object, equal to itself alone."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def _late(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    return dict(graph.late) if isinstance(graph, IterGraph) else {}


def _content(node: fx.Node) -> tuple[Any, ...]:
    return node.name, node.target, node.args, node.kwargs


def _same(content: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether all is equal, and written alike: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return all(
        a is b or (a == b and repr(a) == repr(b)) for a, b in zip(content, other, strict=True)
    )


def _same_meta(meta: dict[str, Any], other: dict[str, Any]) -> bool:
    return meta.keys() == other.keys() and all(
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
