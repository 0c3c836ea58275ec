"""A graph that calls graphs, as one: each call gives way to the nodes of what it calls."""

from __future__ import annotations

from typing import Any

from torch import fx

BOXED_CALL = "call_boxed"
"""The method by which a compiled region is called with a list of its inputs."""


def source_of(owner: Any, path: str) -> fx.GraphModule | None:
    """The graph that the submodule of a module was made from; None where it is unknown."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    found = owner if isinstance(owner, fx.GraphModule) else getattr(owner, "graph_module", None)
    return found if isinstance(found, fx.GraphModule) else None


def call_of(node: fx.Node) -> tuple[fx.GraphModule | None, tuple[Any, ...]] | None:
    """The graph that a node calls, None where that is unknown, and the arguments; None for a node
    that calls no module."""
    owner = node.graph.owning_module
    if node.op == "call_module":
        return source_of(owner, str(node.target)), node.args
    if node.op == "call_method" and node.target == BOXED_CALL:
        module, box = node.args
        if isinstance(module, fx.Node) and isinstance(box, fx.Node):
            return source_of(owner, str(module.target)), box.args
    return None


def in_one(graph: fx.Graph) -> fx.Graph:
    """The graph without calls of other graphs; itself where it has none. It is not to be run."""
    if all(call_of(node) is None for node in graph.nodes):
        return graph
    whole = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            whole.output(fx.node.map_arg(node.args[0], values.__getitem__))
        else:
            values[node] = _inlined(whole, node, values)
    return whole


def _inlined(whole: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    call = call_of(node)
    if call is not None and call[0] is not None:
        given = fx.node.map_arg(call[1], values.__getitem__)
        return _body(whole, call[0].graph, given)
    source = values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
    if isinstance(source, (list, tuple)):  # an item of what a graph returns
        index = node.args[1]
        assert isinstance(index, int)
        return source[index]
    return whole.node_copy(node, values.__getitem__)


def _body(whole: fx.Graph, body: fx.Graph, given: Any) -> Any:
    inside: dict[fx.Node, Any] = {}
    arguments = iter(given)
    for node in body.nodes:
        if node.op == "placeholder":
            inside[node] = next(arguments)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], inside.__getitem__)
        else:
            inside[node] = _inlined(whole, node, inside)
    return ()
