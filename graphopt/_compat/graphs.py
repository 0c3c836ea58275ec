"""`torch.fx` graphs: code, insertion points, and copies of nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is made when it is asked for."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def forward_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph as it is now, which calls operators as directly as torch allows."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    from graphopt._compat.bindings import DirectCalls

    if type(graph_module.graph._codegen) is fx.graph.CodeGen:
        graph_module.graph.set_codegen(DirectCalls())
    graph_module.recompile()
    _LazyGraphModule.force_recompile(graph_module)
    return graph_module.forward


inputs_of: Callable[[fx.Node], Mapping[fx.Node, None]] = attrgetter("_input_nodes")
"""What `all_input_nodes` of a node lists, without making a list: to be read at once, while nobody
edits the node."""

content_of: Callable[[fx.Node], tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = attrgetter(
    "name", "target", "_args", "_kwargs"
)
"""Name, target, arguments and keyword arguments of a node."""


def calls_by_target(graph: fx.Graph) -> Iterator[tuple[Any, Collection[fx.Node]]]:
    """Each target of calls of functions with the nodes that call it, in no order. The graph keeps
    this table up to date itself, and `lint` compares it with the nodes."""
    for op, target, nodes in nodes_by_kind(graph):
        if op == "call_function":
            yield target, nodes


def nodes_by_kind(graph: fx.Graph) -> Iterator[tuple[str, Any, Collection[fx.Node]]]:
    """As `calls_by_target`, of all nodes: kind, target, nodes. Those that are no calls of functions
    have no target here."""
    for (op, target), nodes in graph._find_nodes_lookup_table.table.items():
        if nodes:
            yield op, target, nodes


def code_maker(graph: fx.Graph) -> tuple[Any, Any]:
    """The code generator of a graph, and the transforms of its code before it is compiled."""
    return graph._codegen, graph._codegen._body_transformer


def copy_codegen(source: fx.Graph, destination: fx.Graph) -> None:
    """Let `destination` take and return pytrees as `source` does."""
    destination.set_codegen(copy.deepcopy(source._codegen))


def copy_node(
    graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any], held: Any = None
) -> fx.Node:
    """`graph.node_copy(node, value_of)` in half of the time: arguments are put in when the node is
    there, so that those of a node that exists are not looked through for symbolic numbers.

    Args:
        held: name, target, arguments, keyword arguments and metadata, in place of those of `node`.
    """
    name, target, args, kwargs, meta = held or (
        node.name, node.target, node.args, node.kwargs, node.meta
    )  # fmt: skip
    copy = graph.create_node(node.op, target, name=name, type_expr=node.type)
    # the attribute of the class, past `Node.__setattr__`, which does book-keeping for targets
    if args:
        object.__setattr__(copy, "args", fx.node.map_arg(args, value_of))
    if kwargs:
        object.__setattr__(copy, "kwargs", fx.node.map_arg(kwargs, value_of))
    copy.meta.update(meta)
    return copy


def node_at_line(graph_module: fx.GraphModule, line: int) -> fx.Node | None:
    """The node that a line of the generated code of a graph runs."""
    lines: Any = graph_module._lineno_map
    index = (lines or {}).get(line - graph_module._prologue_start)
    return None if index is None else list(graph_module.graph.nodes)[index]


def inserts_at_end(graph: fx.Graph) -> bool:
    """True if no insertion point is active in a graph."""
    return bool(graph._insert == graph._root.prepend)


def renamed(node: fx.Node, name: str) -> None:
    """Name a node, or as near as a graph without two nodes of one name allows."""
    node._rename(name)


graph_in: attrgetter[fx.Graph] = attrgetter("_graph")
"""The graph that a graph module holds, whatever its property `graph` does."""


def set_graph(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Let a graph module hold a graph. Its code stays as it is."""
    module._graph = graph
