"""Passes for tests, the steps they run on, and how to see that nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt.errors import GraphOptError
from graphopt.graph_utils import call_function_with_meta, find_nodes, get_output, is_operator
from graphopt.iter_graph import IterGraph, IterGraphModule
from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphs import training_step

aten = torch.ops.aten


def declare(registry: PassRegistry, called: str, *constraints: Any, **options: Any) -> Pass:
    """A pass that changes nothing."""

    def function(gm: fx.GraphModule, size: int = 1) -> int:
        return 0

    function.__name__ = called
    return graph_optimization_pass(*constraints, registry=registry, **options)(function)


def double_negation(registry: PassRegistry, **options: Any) -> Pass:
    @graph_optimization_pass(registry=registry, **options)
    def negate_twice(gm: fx.GraphModule, target: str = "aten::gelu") -> int:
        """Negate an activation, and take it back."""
        found = find_nodes(gm.graph, lambda node: is_operator(node.target, target))
        for node in found:
            users = list(node.users)
            with gm.graph.inserting_after(node):
                once = call_function_with_meta(gm.graph, aten.neg.default, (node,), like=node)
            with gm.graph.inserting_after(once):
                twice = call_function_with_meta(gm.graph, aten.neg.default, (once,), like=node)
            for user in users:
                user.replace_input_with(node, twice)
        return len(found)

    return negate_twice


def call(gm: fx.GraphModule, number: int = 0) -> fx.Node:
    """One of the calls of an operator in the forward."""
    gelus = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::gelu"))
    return gelus[number]


def late_step() -> IterGraphModule:
    """A step that has late nodes, a submodule and a record of a pass."""
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def earlier(gm: IterGraphModule) -> int:
        copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
        gm.graph.move_to_next_iter_before(copies[-1:], next(iter(copies[-1].args[0].users)))
        return 1

    module = IterGraphModule(training_step(2))
    module.add_module("inner", nn.Module())
    module.inner.register_buffer("offset", torch.zeros(1))
    module.meta["note"] = "mine"
    earlier(module)
    return module


def state(gm: fx.GraphModule) -> Any:
    """All that a pass may not leave changed. Nodes are given by name."""
    graph = gm.graph
    late = {n.name: d.name for n, d in graph.late.items()} if isinstance(graph, IterGraph) else {}
    return {
        "class": type(graph),
        "owner": graph.owning_module is gm,
        "text": [node.format_node() for node in graph.nodes],
        "types": [node.type for node in graph.nodes],
        "meta": [list(node.meta.items()) for node in graph.nodes],
        "late": late,
        "modules": {name: id(module) for name, module in gm.named_modules()},
        "buffers": {name: id(buffer) for name, buffer in gm.named_buffers()},
        "attributes": sorted(
            (module_name, name)
            for module_name, module in gm.named_modules()
            for name in vars(module)
        ),
        "module meta": dict(gm.meta),
    }


def devastate(gm: fx.GraphModule) -> None:
    """Change everything there is."""
    node = call(gm)
    with gm.graph.inserting_after(node):
        new = call_function_with_meta(gm.graph, aten.neg.default, (node,), like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    node.meta["source"] = "elsewhere"
    node.meta.pop("phase")
    node.name = "renamed"
    if isinstance(gm.graph, IterGraph):
        copies = find_nodes(gm.graph, lambda node: is_operator(node.target, "aten::copy_"))
        late = copies[0]
        gm.graph.move_to_next_iter_before([late], next(iter(late.args[0].users)))
    last = get_output(gm.graph)
    results, updates, carried = last.args[0]
    last.args = ((results, updates[:1], carried),)
    for update in updates[1:]:
        gm.graph.erase_node(update)
    gm.add_module("added", nn.ReLU())
    gm.register_buffer("number", torch.zeros(1))
    gm.note = "more"
    gm.meta["note"] = "theirs"
    gm.meta["more"] = 1
    if hasattr(gm, "inner"):
        gm.inner.offset = torch.ones(1)
        gm.inner.extra = 1


def drop_update(gm: fx.GraphModule) -> None:
    output = get_output(gm.graph)
    results, updates, carried = output.args[0]
    output.args = ((results, updates[1:], carried),)
    gm.graph.erase_node(updates[0])


def rewire(gm: fx.GraphModule) -> None:
    first, second = call(gm, 0), call(gm, 1)
    second.replace_input_with(second.args[0], first)


def refused(
    function: Callable[..., Any], gm: fx.GraphModule | None = None, **options: Any
) -> GraphOptError:
    """The error of a pass, after which the graph is the same."""
    gm = training_step(2) if gm is None else gm
    before = state(gm)
    with pytest.raises(GraphOptError) as caught:
        graph_optimization_pass(registry=PassRegistry())(function)(gm, **options)
    assert state(gm) == before
    return caught.value
