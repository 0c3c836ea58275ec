"""Decomposes nodes that passes insert into the operators that Inductor has code for.

Inductor decomposes operators while a graph is traced. A pass runs afterwards, and what it inserts,
such as `new_zeros`, would meet a compiler that knows only `full`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from graphopt._compat import hooks as _torch
from graphopt.ir.metadata import fake_value


def targets_of(graph: fx.Graph) -> dict[str, Any]:
    """The targets of nodes by name: nodes of a restored graph are copies."""
    return {node.name: node.target for node in graph.nodes}


def decompose_new(graph: fx.Graph, before: Mapping[str, Any]) -> None:
    """Decomposes the calls that are not in `before`, which `targets_of` returned."""
    for node in list(graph.nodes):
        is_new = node.op == "call_function" and before.get(node.name) is not node.target
        if is_new and _torch.has_decomposition(node.target):
            _inline(graph, node)


def _inline(graph: fx.Graph, node: fx.Node) -> None:
    traced = _traced(node)
    if any(inner.op == "get_attr" for inner in traced.nodes):
        return  # it needs constants of its own
    copies = dict(zip(traced.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced, copies)
    for inner, copy in copies.items():
        if inner.op != "placeholder":
            copy.meta = {**node.meta, "val": fake_value(inner)}
            copy.meta.pop("tensor_meta", None)
    _replace(graph, node, result)


def _traced(node: fx.Node) -> fx.Graph:
    """A graph of one call, as a function of the node's inputs."""
    inputs = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    return _torch.trace_decomposed(call, [fake_value(source) for source in inputs], node).graph


def _replace(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            assert item.target is operator.getitem
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)
