"""A graph module as it is before a pass, to compare with and to return to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt.graph_utils import follows_output_convention
from graphopt.host import HostCall
from graphopt.iter_graph import IterGraph
from graphopt.iter_graph.graph import empty_like
from graphopt.runtime.collector import collector_paused
from graphopt.verify import Problem
from graphopt.verify.interface import kinds_returned
from graphopt.verify.metadata import Given
from graphopt.verify.module_constants import attribute

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TABLES = ("_modules", "_parameters", "_buffers", *_HOOKS)

_PLAIN = (bool, int, float, str)
"""Types of metadata that are compared by value; all others by identity, since to compare tensors
would compute."""


class NodeRecord(NamedTuple):
    """What a node held: all that a copy of it is made of."""

    content: tuple[Any, ...]
    meta: dict[str, Any]


def noted(node: fx.Node) -> NodeRecord:
    """What a node holds now."""
    # as `NodeRecord(...)` does it, without the detour through a function written in Python
    return tuple.__new__(NodeRecord, (_compat.content_of(node), node.meta.copy()))


class Snapshot:
    """The state of a graph module when this is made.

    What every node holds is noted at once, and the graph as it was is made of that when somebody
    asks for it: nearly always nobody does.

    Attributes:
        nodes: what each node held, in the order of the graph.
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
        self.late = late_nodes(gm.graph)
        self._constants = {str(n.target): _content_of(gm, n) for n in _attributes_read(gm)}
        self._host_calls = [(n, n.target, dict(vars(n.target))) for n in _host_calls(gm.graph)]
        self._hooks = _hooks(gm)
        self.note_attributes()
        self.placeholders = [n.target for n in nodes if n.op == "placeholder"]
        self.kinds_returned = kinds_returned(gm.graph)
        self.functional = follows_output_convention(gm.graph)
        self.annotated = not any(n.op != "output" for n in nodes if "val" not in n.meta)

    def note_attributes(self) -> None:
        """Take what the module and its submodules hold besides the graph as it is now."""
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
        """A copy of the graph as it was, late marks included."""
        return self._copied[0]

    @property
    def copies(self) -> Mapping[fx.Node, fx.Node]:
        """Node of the graph module as it was -> its copy in `graph`."""
        return self._copied[1]

    @property
    def is_of_the_same_graph(self) -> bool:
        """Whether the graph module still has the graph object that it had."""
        return self._gm.graph is self._original

    @property
    def correspondence(self) -> dict[fx.Node, fx.Node] | None:
        """Node of the graph module -> what it was before; None if its graph is another one."""
        return dict(self.copies) if self.is_of_the_same_graph else None

    def unchanged(self) -> bool:
        """Whether the graph is still the same: nodes, arguments, metadata, late marks."""
        graph = self._gm.graph
        if graph is not self._original or len(graph.nodes) != len(self.nodes):
            return False
        if late_nodes(graph) != self.late:
            return False
        content_of = _compat.content_of
        for node, (old, (content, meta)) in zip(graph.nodes, self.nodes.items(), strict=True):
            if node is not old or not _same(content_of(node), content):
                return False
            if not _same_meta(node.meta, meta):
                return False
        return True

    def new_nodes(self) -> Iterable[fx.Node]:
        """Nodes that were not there."""
        known = self.nodes
        return [node for node in self._gm.graph.nodes if node not in known]

    def changed_nodes(self) -> list[tuple[fx.Node, Any]]:
        """Nodes with another operator, other arguments or another `meta["val"]`, and what the
        latter was."""
        found = []
        known, content_of = self.nodes.get, _compat.content_of
        for node in self._gm.graph.nodes:
            held = known(node)
            if held is None:
                continue
            content, meta = held
            value = meta.get("val")
            if node.meta.get("val") is not value or not _same(content_of(node), content):
                found.append((node, value))
        return found

    def former_arguments(self, node: fx.Node) -> Any:
        """What a node got that was there, positional and by name."""
        _, _, args, kwargs = self.nodes[node].content

        def given(source: fx.Node) -> Any:
            return Given(self.nodes[source].meta.get("val"))

        return fx.node.map_arg((args, kwargs), given)

    def changed_besides(self) -> list[Problem]:
        """What a pass has changed that is no part of the graph, but decides what it does: constants
        of the module, calls of the program's functions, hooks."""
        problems = self.changed_constants()
        for node, call, was in self._host_calls:
            now = vars(call)
            if any(now.get(name) is not held for name, held in was.items()):
                hint = "graphopt.host.insert_callback puts in a call of another function"
                problems.append(Problem("it changed what a callback calls, or when", (node,), hint))
        hooks = _hooks(self._gm)
        if any(held != self._hooks.get(module, _NO_HOOKS) for module, held in hooks.items()):
            hint = "what a pass changes is the graph"
            problems.append(Problem("it added or removed a hook of the module", hint=hint))
        return problems

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
        for _, call, held in self._host_calls:
            vars(call).update(held)
        self._gm.graph = self.graph


def copy_of(
    node: fx.Node, held: NodeRecord, graph: fx.Graph, value_of: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """What a node was, at the end of another graph."""
    return _compat.copy_node(graph, node, value_of, (*held.content, held.meta))


def _attributes_read(gm: fx.GraphModule) -> list[fx.Node]:
    return cast(list[fx.Node], gm.graph.find_nodes(op="get_attr"))


def _host_calls(graph: fx.Graph) -> list[fx.Node]:
    calls = _compat.calls_by_target(graph)
    return [node for target, nodes in calls if isinstance(target, HostCall) for node in nodes]


def _hooks(gm: nn.Module) -> dict[nn.Module, list[Any]]:
    """What runs when a module or one of its submodules is called, besides its graph."""
    return {module: _hooks_of(vars(module)) for module in gm.modules()}


def _hooks_of(held: dict[str, Any]) -> list[Any]:
    return [held.get("forward"), *(list(held[table].items()) for table in _HOOKS)]


_NO_HOOKS: list[Any] = [None, *([] for _ in _HOOKS)]


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


def late_nodes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    return dict(graph.late) if isinstance(graph, IterGraph) else {}


def _same(content: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether all is equal, and written alike: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
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
