"""Parts that are cut out of a graph, and graphs in which they are one call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphopt.ir.metadata import fake_value, phase_of, written_arguments
from graphopt.ir.outlining import (
    NodeCopies,
    OutlinedPart,
    describe_call,
    give_items,
    leaving,
    splice,
)
from graphopt.ir.views import is_pure_view
from sketch import Sketch

aten = torch.ops.aten


def chain() -> fx.GraphModule:
    """x -> sin -> its transpose -> cos, of which the first two results are read outside as well."""
    s = Sketch()
    x = s.input("x", 2, 3)
    sin = s.call(aten.sin.default, x)
    turned = s.call(aten.t.default, sin)
    cos = s.call(aten.cos.default, turned)
    outside = s.call(aten.exp.default, turned)
    return s.step([cos, outside])


def taken(part: OutlinedPart, copies: NodeCopies, node: fx.Node) -> fx.Node:
    return copies.copy(node) if is_pure_view(node) else part.take(node)


def part_of(gm: fx.GraphModule, *targets: object) -> OutlinedPart:
    part = OutlinedPart([node for node in gm.graph.nodes if node.target in targets], taken)
    part.fill(without=is_pure_view)
    part.returning(leaving(part.nodes))
    return part


def spliced(gm: fx.GraphModule, *parts: OutlinedPart) -> fx.GraphModule:
    root = fx.GraphModule(gm, gm.graph)

    def call(copies: NodeCopies, part: OutlinedPart) -> None:
        name = f"part_{parts.index(part)}"
        root.add_submodule(name, fx.GraphModule({}, part.graph))
        called = copies.graph.call_module(name, tuple(map(copies, part.inputs)))
        describe_call(called, part, part.inputs[:1])
        give_items(copies, part, called)

    def make(copies: NodeCopies, node: fx.Node) -> Any:
        return copies.copy(node)

    graph = splice(gm.graph, gm.graph.nodes, parts, call, make)
    graph.lint()
    return fx.GraphModule(root, graph)


def test_a_view_that_is_read_outside_is_made_again_there() -> None:
    gm = chain()
    part = part_of(gm, aten.sin.default, aten.t.default, aten.cos.default)
    assert [node.name for node in part.inputs] == ["x"]
    assert [node.target for node in part.outputs] == [aten.sin.default, aten.cos.default]
    after = spliced(gm, part)
    targets = [node.target for node in after.graph.nodes if node.op.startswith("call")]
    items = [operator.getitem, operator.getitem]
    assert targets == ["part_0", *items, aten.t.default, aten.exp.default]
    x = torch.randn(2, 3)
    for old, new in zip(gm(x)[0], after(x)[0], strict=True):
        assert torch.equal(old, new)


def test_a_view_of_what_another_part_returns_is_made_inside() -> None:
    gm = chain()
    first, second = part_of(gm, aten.sin.default), part_of(gm, aten.cos.default)
    assert second.inputs == first.outputs
    assert [node.target for node in second.graph.nodes if node.op == "call_function"] == [
        aten.t.default,
        aten.cos.default,
    ]
    x = torch.randn(2, 3)
    after = spliced(gm, first, second)
    for old, new in zip(gm(x)[0], after(x)[0], strict=True):
        assert torch.equal(old, new)


def test_what_is_said_of_a_call() -> None:
    gm = chain()
    part = part_of(gm, aten.sin.default, aten.t.default, aten.cos.default)
    (call,) = spliced(gm, part).graph.find_nodes(op="call_module", target="part_0")
    assert [value.shape for value in fake_value(call)] == [(2, 3), (3, 2)]
    assert phase_of(call) == "forward"
    assert written_arguments(call) == (0,)


def test_inputs_keep_the_order_in_which_they_are_taken() -> None:
    s = Sketch()
    x, y = s.input("x", 2), s.input("y", 2)
    z = s.call(aten.sub.Tensor, y, x)
    gm = s.step([s.call(aten.mul.Tensor, z, x)])
    part = part_of(gm, aten.sub.Tensor, aten.mul.Tensor)
    assert [node.name for node in part.inputs] == ["y", "x"]
    assert [n.name for n in part.graph.find_nodes(op="placeholder")] == ["y", "x"]
