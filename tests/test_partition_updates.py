"""Updates in place and random numbers happen in the order of the graph, however it is split."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch import make_fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from graphopt.partition import PartitionCycleError, split_module
from partitions import by_name
from slices import examples


def order(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.find_nodes(op="call_module")]


def assert_split_is_same(module: fx.GraphModule, callback: Any, *inputs: Tensor) -> list[str]:
    """The order of partitions of a split whose results and effects are the module's."""
    split = split_module(module, None, callback)
    ours, theirs = ([x.clone() for x in inputs] for _ in range(2))
    torch.manual_seed(1)
    found = split(*ours)
    torch.manual_seed(1)
    expected = module(*theirs)
    for left, right in zip((found, *ours), (expected, *theirs), strict=True):
        assert torch.equal(left, right)
    return order(split)


def test_a_read_stays_before_the_update() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sin()
        b = x.view(-1).exp()
        x.add_(a)
        return b

    # By its first node, "w" would come before "r", which does not read anything from it.
    names = by_name(sin="w", view="r", exp="r", add_="w")
    assert assert_split_is_same(fx.symbolic_trace(f), names, torch.randn(3)) == [
        "submod_r",
        "submod_w",
    ]


def aten_update(x: Tensor, y: Tensor) -> Tensor:
    a = x.sin()
    b = x.view(-1).exp()
    x.copy_(a + y)
    return b


def test_schemas_say_what_is_updated() -> None:
    module = make_fx(aten_update)(torch.randn(3), torch.randn(3))
    names = {"sin": "w", "view": "r", "exp": "r", "add": "w", "copy_": "w"}
    inputs = torch.randn(2, 3)
    called = assert_split_is_same(module, lambda n: names[n.name], *inputs)
    assert called == ["submod_r", "submod_w"]


def call(function: Callable[..., Any], x: Any, *args: Any) -> None:
    """Record what Python gives no way to write with a proxy."""
    x.tracer.create_proxy("call_function", function, (x, *args), {})


def in_place(statement: Callable[[Tensor], Any]) -> fx.GraphModule:
    """A read, an update, and a read again, which no argument connects."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            a = x.sin()
            statement(self, x)
            return torch.maximum(a, x.exp())

    return fx.symbolic_trace(Model())


UPDATES = {
    "method": lambda m, x: x.mul_(2),
    "function": lambda m, x: torch.relu_(x),
    "functional": lambda m, x: torch.nn.functional.relu(x, inplace=True),
    "module": lambda m, x: m.relu(x),
    "operator": lambda m, x: call(operator.iadd, x, 1),
    "item": lambda m, x: call(operator.setitem, x, 0, 5.0),
    "out": lambda m, x: torch.cos(x, out=x),
    "view": lambda m, x: x.view(3).mul_(2),
    "function view": lambda m, x: torch.flatten(x).mul_(2),
    "attribute": lambda m, x: x.data.mul_(2),
    "item view": lambda m, x: x[1:].mul_(2),
    "module view": lambda m, x: m.same(x).mul_(2),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_every_kind_of_update(kind: str) -> None:
    module = in_place(UPDATES[kind])
    reads = {"sin", "exp", "maximum"}
    with pytest.raises(PartitionCycleError) as caught:
        split_module(module, None, lambda node: "reads" if node.name in reads else "updates")
    assert "overwrites what is read by %sin" in str(caught.value)
    assert "%exp reads what is updated by" in str(caught.value)
    three = {"sin": "before", "exp": "after", "maximum": "after"}
    called = assert_split_is_same(
        module, lambda node: three.get(node.name, "update"), torch.randn(3)
    )
    assert called == ["submod_before", "submod_update", "submod_after"]


def test_random_numbers_keep_their_order() -> None:
    def f(x: Tensor) -> Tensor:
        a = torch.ops.aten.bernoulli.p(x, 0.5)
        b = torch.ops.aten.bernoulli.p(x, 0.5)
        return b - a

    module = fx.symbolic_trace(f)
    names = {"bernoulli_p": "first", "bernoulli_p_1": "second", "sub": "second"}
    assert_split_is_same(module, lambda node: names[node.name], torch.randn(64))
    with pytest.raises(PartitionCycleError, match="%bernoulli_p_1 draws random numbers after"):
        split_module(module, None, by_name(bernoulli_p=0, bernoulli_p_1=1, sub=0))


def test_a_wait_reads_what_its_collective_sends() -> None:
    ops = torch.ops._c10d_functional
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    new = graph.call_function(torch.sin, (y,))
    launch = graph.call_function(ops.all_gather_into_tensor.default, (x, 2, "0"))
    done = graph.call_function(ops.wait_tensor.default, (launch,))
    update = graph.call_function(torch.ops.aten.copy_.default, (x, new))
    graph.output((done, update))
    partitions = {new: "update", launch: "launch", done: "wait", update: "update"}
    split = split_module(fx.GraphModule({}, graph), None, partitions.__getitem__)
    assert order(split) == ["submod_launch", "submod_wait", "submod_update"]


def test_one_attribute_under_two_nodes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    read, written = graph.get_attr("w"), graph.get_attr("w")
    new = graph.call_function(torch.sin, (x,))
    before = graph.call_function(torch.cos, (read,))
    update = graph.call_method("copy_", (written, new))
    graph.output((before, update))
    partitions = {new: "update", before: "read", update: "update"}
    split = split_module(fx.GraphModule({"w": torch.ones(2)}, graph), None, partitions.get)
    assert order(split) == ["submod_read", "submod_update"]


def test_a_view_that_its_schema_denies() -> None:
    def f(x: Tensor) -> Tensor:
        new = torch.sin(x)
        view = torch.ops.aten._unsafe_view(x, [3])
        before = torch.exp(x)
        view.mul_(new)
        return before

    module = make_fx(f, tracing_mode="fake")(torch.randn(3))
    names = {"sin": "update", "_unsafe_view": "update", "exp": "read", "mul_": "update"}
    called = assert_split_is_same(module, lambda node: names[node.name], torch.randn(3))
    assert called == ["submod_read", "submod_update"]


def test_results_of_one_call_are_apart() -> None:
    def f(x: Tensor) -> Any:
        values, indices = torch.topk(x, 2)
        values.mul_(2)
        return values, indices + 1

    module = make_fx(f, tracing_mode="fake")(torch.randn(3))
    split = split_module(module, None, lambda node: node.name == "mul_")
    assert order(split) == ["submod_False", "submod_True"]


def test_results_that_are_read_as_a_list() -> None:
    def f(x: Tensor) -> Tensor:
        new = torch.sin(x)
        halves = torch.split_copy(x, 1)
        joined = torch.cat(halves)
        halves[0].mul_(new[:1])
        return joined

    module = make_fx(f, tracing_mode="fake")(torch.randn(2))
    halves, joined = (n for n in module.graph.nodes if n.name in ("split_copy", "cat"))
    joined.args = (halves,)
    with pytest.raises(PartitionCycleError, match="%mul_ overwrites what is read by %cat"):
        split_module(module, None, lambda node: node.name == "cat")


@st.composite
def programs(draw: Any) -> fx.GraphModule:
    """Straight-line programs with updates in place, through views as well."""
    graph = fx.Graph()
    pool = [graph.placeholder("x"), graph.placeholder("y")]
    aten = torch.ops.aten
    for _ in range(draw(st.integers(2, 10))):
        a, b = (draw(st.sampled_from(pool)) for _ in range(2))
        kind = draw(st.sampled_from(["fresh", "fresh", "view", "update", "method", "random"]))
        if kind == "fresh":
            pool.append(graph.call_function(aten.add.Tensor, (a, b)))
        elif kind == "view":
            pool.append(graph.call_function(aten.view.default, (a, [4])))
        elif kind == "update":
            pool.append(graph.call_function(aten.mul_.Tensor, (a, b)))
        elif kind == "method":
            graph.call_method("add_", (a, 1))
        else:
            pool.append(graph.call_function(aten.rand_like.default, (a,)))
    graph.output(pool[-1])
    return fx.GraphModule({}, graph)


@settings(max_examples=examples(30))
@given(st.data())
def test_no_split_changes_what_updates_do(data: st.DataObject) -> None:
    module = data.draw(programs())
    numbers = {node: data.draw(st.integers(0, 2)) for node in module.graph.nodes}
    split = split_module(module, None, numbers.__getitem__, on_cycle="merge")
    ours, theirs = ([torch.arange(4.0), torch.ones(4)] for _ in range(2))
    torch.manual_seed(1)
    found = split(*ours)
    torch.manual_seed(1)
    expected = module(*theirs)
    for left, right in zip((found, *ours), (expected, *theirs), strict=True):
        assert torch.equal(left, right)
