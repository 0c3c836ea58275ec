"""`torch.fx` graphs: code, insertion points, and copies of nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is generated when it is first needed."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def forward_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """The compiled forward of a graph, which calls operators as directly as torch allows."""
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
    """The nodes that call each function target, unordered: the table that fx keeps up to date
    itself."""
    for op, target, nodes in nodes_by_kind(graph):
        if op == "call_function":
            yield target, nodes


def nodes_by_kind(graph: fx.Graph) -> Iterator[tuple[str, Any, Collection[fx.Node]]]:
    """All nodes by kind and target; only function calls have a target here."""
    for (op, target), nodes in graph._find_nodes_lookup_table.table.items():
        if nodes:
            yield op, target, nodes


def code_maker(graph: fx.Graph) -> tuple[Any, Any]:
    """The code generator of a graph, and its code transforms."""
    return graph._codegen, graph._codegen._body_transformer


def copy_codegen(source: fx.Graph, destination: fx.Graph) -> None:
    """Copies the pytree convention of `source`'s arguments and results to `destination`.

    Their structure is not copied: nobody changes it, and copying warns in torch 2.13.
    """
    destination.set_codegen(copy.copy(source._codegen))


def copy_node(
    graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any], held: Any = None
) -> fx.Node:
    """A faster `graph.node_copy(node, value_of)`, which sets arguments only after the node exists.

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
    """The node that a line of a graph's generated code runs."""
    lines: Any = graph_module._lineno_map
    index = (lines or {}).get(line - graph_module._prologue_start)
    return None if index is None else list(graph_module.graph.nodes)[index]


def inserts_at_end(graph: fx.Graph) -> bool:
    """True if a graph has no active insertion point."""
    return bool(graph._insert == graph._root.prepend)


def renamed(node: fx.Node, name: str) -> None:
    """Renames a node, with a number added if the name is taken."""
    node._rename(name)


graph_in: attrgetter[fx.Graph] = attrgetter("_graph")
"""The graph that a graph module holds, whatever its property `graph` does."""


def set_graph(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Sets the graph of a graph module without generating its code."""
    module._graph = graph
