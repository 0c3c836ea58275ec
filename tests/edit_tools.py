"""What edits of captured steps, legal and illegal ones, are made with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from graphopt.graph_utils import (
    call_function_with_meta,
    evaluate,
    is_collective,
    is_list_operator,
    is_operator,
    is_random,
    is_wait,
    same_kind,
)
from graphopt.iter_graph import IterGraph
from graphopt.verify.values.terms import layout_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Edit = Callable[[fx.GraphModule, Random], "list[fx.Node] | None"]
"""Changes a graph at a random place and returns the nodes there; None: it has no such place."""


def pick(draw: Random, nodes: Iterable[Any]) -> Any:
    """One of them; None of none."""
    found = list(nodes)
    return draw.choice(found) if found else None


def calls(gm: fx.GraphModule, *names: str) -> list[fx.Node]:
    """Calls of operators, of all or of those named."""
    return [
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and (not names or is_operator(node.target, *names))
    ]


def is_tensor(node: Any, floating: bool = True) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and (value.is_floating_point() or not floating)


def computed(gm: fx.GraphModule) -> list[fx.Node]:
    """Float tensors that plain operators compute and somebody reads."""
    return [
        node
        for node in calls(gm)
        if is_tensor(node) and node.users and not is_collective(node) and not is_update(node)
    ]


def is_update(node: fx.Node) -> bool:
    return is_operator(node.target, "aten::copy_")


def plain(gm: fx.GraphModule) -> list[fx.Node]:
    """Calls without communication, random numbers, lists, items or updates."""
    return [
        node
        for node in calls(gm)
        if not (is_collective(node) or is_wait(node) or is_random(node) or is_update(node))
        and not is_list_operator(node)
        and node.target is not operator.getitem
        and node.users
    ]


def waits(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in calls(gm) if is_wait(n) and n.users and is_tensor(n.args[0])]


def launches(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in calls(gm) if is_collective(n) and is_tensor(n.args[0])]


def put_after(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Let all readers of `node` read ``target(node, *args)``, late where `node` is."""
    users = list(node.users)
    new = added(node, target, node, *args, **kwargs)
    for user in users:
        user.replace_input_with(node, new)
    return new


def added(after: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that stands after a node, or after the placeholders, and is as late as the node."""
    graph, place = after.graph, after
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    with graph.inserting_after(place):
        new = call_function_with_meta(graph, target, args, kwargs, like=after)
    if isinstance(graph, IterGraph) and graph.is_late(after):
        graph.mark_late(new, graph.late[after])
    return new


def renewed(node: fx.Node) -> bool:
    """Compute `meta["val"]` of a changed node again; whether its readers take that."""
    before = layout(node.meta["val"])
    try:
        node.meta["val"] = evaluate(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    except Exception:
        return False
    return layout(node.meta["val"]) == before


def layout(value: Any) -> Any:
    if isinstance(value, Tensor):
        return layout_of(value)
    if isinstance(value, (list, tuple)):
        return [layout(entry) for entry in value]
    return type(value)


def replaced(value: Any, old: Any, new: Any) -> Any:
    """A nest of arguments in which one object stands for another."""
    if value is old:
        return new
    if isinstance(value, (list, tuple)):
        return [replaced(entry, old, new) for entry in value]
    return value


def with_arg(node: fx.Node, index: int, value: Any) -> None:
    node.args = (*node.args[:index], value, *node.args[index + 1 :])


def others(gm: fx.GraphModule, node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Other tensors of the kind of `node` that stand before another node and are as late."""
    late = gm.graph.late if isinstance(gm.graph, IterGraph) else {}
    return [
        other
        for other in gm.graph.nodes
        if other is not node
        and other < before
        and same_kind(other, node)
        and not is_update(other)
        and not is_collective(other)
        and (other in late) == (node in late)
    ]
