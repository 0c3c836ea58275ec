"""Inlining: a graph that calls other graphs, turned into one graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import fx, nn

from graphopt.verify.checks.module_constants import attribute, same_object

Values = dict[fx.Node, Any]
"""For each node of an inlined graph, its copy, or the nest of nodes that a graph returns."""

BOXED_CALL = "call_boxed"
"""The method of compiled regions that takes a list of inputs."""


def source_of(owner: Any, path: str) -> fx.GraphModule | None:
    """Returns the graph that a submodule was made from, or None if that is unknown."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return graph_of_part(owner)


def graph_of_part(part: Any) -> fx.GraphModule | None:
    """Returns the graph module that a module is or was compiled from, or None if that is
    unknown."""
    found = part if isinstance(part, fx.GraphModule) else getattr(part, "graph_module", None)
    return found if isinstance(found, fx.GraphModule) else None


def call_of(node: fx.Node) -> tuple[fx.GraphModule | None, tuple[Any, ...]] | None:
    """Returns the graph that a node calls (None if unknown) and the arguments; None if it calls no
    module."""
    owner = node.graph.owning_module
    if node.op == "call_module":
        body = source_of(owner, str(node.target))
        return body if body is not None and _takes(body.graph, node) else None, node.args
    if node.op == "call_method" and node.target == BOXED_CALL:
        module, box = node.args
        if isinstance(module, fx.Node) and isinstance(box, fx.Node):
            return source_of(owner, str(module.target)), box.args
    return None


def _takes(graph: fx.Graph, call: fx.Node) -> bool:
    """True if a call passes all inputs of a graph by position, texts such as profiler names
    aside."""
    inputs = len(graph.find_nodes(op="placeholder"))
    plain = all(isinstance(value, str) for value in call.kwargs.values())
    return plain and inputs == len(call.args)


def constant_name(node: fx.Node, outer: Any) -> str:
    """Returns the name under which a submodule's constant is known: its own, if that is unambiguous
    in the calling module `outer` and its other parts."""
    there, found = attribute(outer, node), attribute(node.graph.owning_module, node)
    others = [there] if there is not None else [attribute(part, node) for part in _parts(outer)]
    if all(other is None or same_object(other, found) for other in others):
        return str(node.target)
    return f"{node.target} of {id(found)}"


def _parts(outer: Any) -> Iterator[Any]:
    for module in outer.modules() if isinstance(outer, nn.Module) else ():
        yield getattr(module, "graph_module", module)


def inline(
    body: fx.Graph, arguments: Iterable[Any], append: Callable[[fx.Node, Values], Any]
) -> Any:
    """Appends what a graph computes for these arguments to another graph.

    Args:
        append: given a node and the values of those before it, appends the node.

    Returns:
        What the graph returns, nested alike.
    """
    values: Values = {}
    given = iter(arguments)
    for node in body.nodes:
        source = values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        elif node.target is operator.getitem and isinstance(source, (list, tuple)):
            values[node] = source[node.args[1]]  # of what a graph returned
        else:
            values[node] = append(node, values)
    return None


def in_one(graph: fx.Graph) -> fx.Graph:
    """Returns the graph with all calls of other graphs inlined, for reading only; itself if it has
    none."""
    if not any(graph.find_nodes(op=op) for op in ("call_module", "call_method")):
        return graph
    whole = fx.Graph()
    inputs = map(whole.node_copy, graph.find_nodes(op="placeholder"))
    whole.output(inline(graph, inputs, partial(_appended, whole, graph.owning_module)))
    return whole


def _appended(whole: fx.Graph, outer: Any, node: fx.Node, values: Values) -> Any:
    call = call_of(node)
    if call is not None and call[0] is not None:
        given = fx.node.map_arg(call[1], values.__getitem__)
        return inline(call[0].graph, given, partial(_appended, whole, outer))
    copy = whole.node_copy(node, values.__getitem__)
    if node.op == "get_attr" and node.graph.owning_module is not outer:
        copy.target = constant_name(node, outer)
    return copy
