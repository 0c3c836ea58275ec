"""Rewrites that keep a step's dependencies, written by hand for the tests of the checks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_output,
    get_outputs,
    is_operator,
    is_wait,
)
from graphopt.iter_graph import copy_graph
from graphopt.verify import DependencyReport, check_dependencies

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def snapshot(graph_module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph, and the copy of each node."""
    return copy_graph(graph_module.graph)


def nodes_of(graph_module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return find_nodes(graph_module.graph, lambda node: node.target == target)


def updates_of(graph_module: fx.GraphModule) -> list[fx.Node]:
    return get_outputs(graph_module.graph).updates


def reduced(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The waits of all all-reduces."""
    graph = graph_module.graph
    waits = find_nodes(graph, is_wait)
    return [w for w in waits if is_operator(w.args[0].target, "_c10d_functional::all_reduce")]


def report_of(
    graph_module: fx.GraphModule, rewrite: Callable[[fx.GraphModule], None]
) -> DependencyReport:
    """What is said of a rewrite, which is the same with nodes matched by name."""
    before, copies = snapshot(graph_module)
    rewrite(graph_module)
    report = check_dependencies(before, graph_module, correspondence=copies)
    assert check_dependencies(before, graph_module).ok == report.ok
    return report


def fuse(graph_module: fx.GraphModule, size: int) -> None:
    """All-reduces in buckets of `size`: cat -> all_reduce -> wait -> split."""
    graph, waits = graph_module.graph, reduced(graph_module)
    for start in range(0, len(waits), size):
        _fuse_bucket(graph, waits[start : start + size])
    graph.lint()


def _fuse_bucket(graph: fx.Graph, waits: Sequence[fx.Node]) -> None:
    launches = [wait.args[0] for wait in waits]
    sent = [launch.args[0] for launch in launches]
    settings = launches[0].args[1:]

    def call(target: Any, *args: Any) -> fx.Node:
        return call_function_with_meta(graph, target, args, like=waits[0])

    with graph.inserting_before(max(launches)):
        flat = [call(aten.view.default, gradient, [-1]) for gradient in sent]
        bucket = call(aten.cat.default, flat)
        launch = call(c10d.all_reduce.default, bucket, *settings)
    with graph.inserting_before(min(waits)):
        total = call(c10d.wait_tensor.default, launch)
        sizes = [gradient.meta["val"].numel() for gradient in sent]
        parts = call(aten.split_with_sizes.default, total, sizes)
        for index, (wait, gradient) in enumerate(zip(waits, sent, strict=True)):
            part = call(operator.getitem, parts, index)
            shape = list(gradient.meta["val"].shape)
            wait.replace_all_uses_with(call(aten.view.default, part, shape))
    for node in (*waits, *launches):
        graph.erase_node(node)


def split_list_operator(graph_module: fx.GraphModule, node: fx.Node, at: int) -> None:
    """A list operator in two: of its first `at` elements, and of the others."""
    graph = graph_module.graph
    count = len(node.args[0])

    def part(value: Any, elements: slice) -> Any:
        return (
            value[elements] if isinstance(value, (list, tuple)) and len(value) == count else value
        )

    with graph.inserting_before(node):
        halves = [
            call_function_with_meta(
                graph,
                node.target,
                tuple(part(argument, elements) for argument in node.args),
                {key: part(value, elements) for key, value in node.kwargs.items()},
                like=node,
            )
            for elements in (slice(at), slice(at, None))
        ]
    _replace_items(graph, node, lambda index: (halves[index >= at], index - at * (index >= at)))
    graph.lint()


def _replace_items(
    graph: fx.Graph, node: fx.Node, place: Callable[[int], tuple[fx.Node, int]]
) -> None:
    """Let the items of a list operator be picked from others: `place(index)` is where it is now."""
    nested = isinstance(node.meta["val"][0], (list, tuple))
    for outer in list(node.users):
        leaves: Iterable[fx.Node] = list(outer.users) if nested else [outer]
        for leaf in leaves:
            with graph.inserting_before(leaf):
                half, index = place(leaf.args[1])
                if nested:
                    args = (half, outer.args[1])
                    half = call_function_with_meta(graph, operator.getitem, args, like=outer)
                new = call_function_with_meta(graph, operator.getitem, (half, index), like=leaf)
            leaf.replace_all_uses_with(new)
            graph.erase_node(leaf)
        if nested:
            graph.erase_node(outer)
    graph.erase_node(node)


def in_order(graph_module: fx.GraphModule, order: Iterable[fx.Node]) -> None:
    """Put the nodes of a graph in another order; placeholders and output stay where they are."""
    output = get_output(graph_module.graph)
    for node in order:
        if node.op not in ("placeholder", "output"):
            output.prepend(node)
