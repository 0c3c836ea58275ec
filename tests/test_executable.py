"""The executable dialect: in place where nobody can tell, by who shares memory and reads it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import graphopt
from graphopt.executable import finalize
from graphopt.graph_utils import get_outputs, is_dense
from graphopt.ir.accesses import Hazard, MemoryOrder
from graphopt.ir.effects import Effects
from graphopt.ir.inplace import inplace_form
from graphopt.ir.views import is_pure_view, may_be_view
from graphopt.pipelining.pipe.mutation import Mutations
from sketch import Sketch, c10d, targets
from zoo import MLP, MODELS, train_step

aten = torch.ops.aten


def operators(graph_module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


def captured_graph(step: Callable[..., Any], *args: Any) -> fx.GraphModule:
    return graphopt.capture(step, *args).graph_module


def steady(optimizer_of: Callable[..., Optimizer]) -> fx.GraphModule:
    model = MLP()
    optimizer = optimizer_of(model.parameters())
    batch = MODELS["mlp"].batch(0)
    train_step(model, optimizer, *batch)
    return captured_graph(train_step, model, optimizer, *batch)


@pytest.mark.parametrize("mode", ["fused", "foreach", "loop"])
def test_optimizers_update_in_place(mode: str) -> None:
    """No copy of a parameter or of optimizer state is left, and the captured graph is untouched."""
    captured = steady(
        lambda p: torch.optim.AdamW(p, foreach=mode == "foreach", fused=mode == "fused")
    )
    before = operators(captured)
    executable = finalize(captured)
    assert operators(captured) == before
    assert "aten.copy_.default" in before
    assert "aten.copy_.default" not in operators(executable)
    assert "aten.clone.default" not in operators(executable)
    assert get_outputs(executable.graph).updates == []
    assert len(operators(executable)) < len(before)


def test_first_step_makes_its_state_without_copies() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    captured = captured_graph(train_step, model, optimizer, *MODELS["mlp"].batch(0))
    assert "aten.clone.default" not in operators(finalize(captured))


def test_only_dense_values_are_overwritten() -> None:
    """`(w1 + w2).sum()` gives gradients of stride 0, over one element of storage."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w1 + self.w2 + x).sum()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(2)
        return loss

    expected, model = Sum(), Sum()
    compiled = graphopt.compile(step)
    x = torch.arange(3.0)
    for _ in range(3):
        step(expected, x)
        compiled(model, x)
        assert torch.equal(model.w1.grad, expected.w1.grad)
        assert torch.equal(model.w2.grad, expected.w2.grad)


def test_results_that_are_kept_are_never_overwritten() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> dict[str, Tensor]:
        hidden = model(x)
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"hidden": hidden, "half": hidden[:2], "twice": hidden * 2, "loss": loss}

    compiled = graphopt.compile(step)
    kept, copies = [], []
    for i in range(4):
        result = compiled(model, optimizer, MODELS["mlp"].batch(i)[0])
        kept.append(result)
        copies.append({key: value.clone() for key, value in result.items()})
    for result, copy in zip(kept, copies, strict=True):
        for key in result:
            assert torch.equal(result[key], copy[key])


def test_arguments_are_not_overwritten() -> None:
    model = MLP()
    x, _ = MODELS["mlp"].batch(0)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.relu().add(1).mul(2)).sum()

    before = x.clone()
    graphopt.compile(step)(model, x)
    assert torch.equal(x, before)


def test_argument_that_the_step_changes() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return model(x).sum()

    model = MLP()
    compiled = graphopt.compile(step)
    x, _ = MODELS["mlp"].batch(0)
    eager = x.clone()
    for _ in range(2):
        assert torch.equal(compiled(model, x), step(model, eager).detach())
        assert torch.equal(x, eager)


@pytest.mark.parametrize(
    ("functional", "inplace"),
    [
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.relu.default, aten.relu_.default),
        (aten.bernoulli.p, aten.bernoulli_.float),
        (aten._foreach_add.List, aten._foreach_add_.List),
        (
            torch.ops._c10d_functional.all_reduce.default,
            torch.ops._c10d_functional.all_reduce_.default,
        ),
        (aten.mm.default, None),
        (aten.cumsum.default, None),
        (aten.view.default, None),
    ],
)
def test_inplace_forms(functional: Any, inplace: Any) -> None:
    assert inplace_form(functional) == inplace


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(4, 3)[::2], False),
        (torch.zeros(1).expand(3), False),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
    ],
)
def test_density(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def test_a_call_leaves_nothing_for_the_garbage_collector() -> None:
    """Intermediate values are freed when the call returns, as eager frees them."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    compiled = graphopt.compile(train_step)
    for i in range(3):
        compiled(model, optimizer, *MODELS["mlp"].batch(i))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        compiled(model, optimizer, *MODELS["mlp"].batch(3))
        gc.collect()
        assert [item for item in gc.garbage if isinstance(item, Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_reduction_works_in_place() -> None:
    s = Sketch()
    sent = s.call(aten.neg.default, s.input("x", 8))
    gm = s.step([s.wait(s.all_reduce(sent))])
    assert targets(finalize(gm)) == ["neg", "all_reduce_", "wait_tensor"]


@pytest.mark.parametrize("waited", [True, False], ids=["waited for here", "by a later graph"])
def test_what_a_collective_sends_is_not_overwritten_before_its_wait(waited: bool) -> None:
    s = Sketch()
    sent = s.call(aten.neg.default, s.input("x", 8))
    launch = s.call(c10d.all_gather_into_tensor.default, sent, 1, "0")
    other = s.call(aten.exp.default, sent)
    gm = s.step([other, s.wait(launch)] if waited else [other], carried=[] if waited else [launch])
    assert "exp_" not in targets(finalize(gm))


c10d_functional = torch.ops._c10d_functional


def hazards(graph: fx.Graph) -> set[Hazard]:
    return set(MemoryOrder(graph).hazards)


def test_a_result_written_out_of_place_shares_memory_with_out() -> None:
    graph = fx.Graph()
    x, low, high = (graph.placeholder(name) for name in ("x", "low", "high"))
    both = graph.call_function(aten.aminmax.out, (x,), {"min": low, "max": high})
    both.meta["val"] = (torch.empty(()), torch.empty(()))
    items = [graph.call_function(getitem, (both, i)) for i in (0, 1)]
    graph.output(items)
    effects = Effects(graph)
    assert [effects.input_of(item) for item in items] == [low, high]


def test_what_a_coalesced_collective_sends_is_read_until_the_wait_of_each_item() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    launch = graph.call_function(
        c10d_functional.all_gather_into_tensor_coalesced.default, ([x, y], 2, "g")
    )
    launch.meta["val"] = [torch.empty(2), torch.empty(2)]
    item = graph.call_function(getitem, (launch, 0))
    wait = graph.call_function(c10d_functional.wait_tensor.default, (item,))
    update = graph.call_function(aten.copy_.default, (y, wait))
    graph.output(update)
    assert Effects(graph).read_after(x, launch)
    assert not Effects(graph).read_after(x, wait)
    assert Hazard(wait, update, "WAR") in hazards(graph)


def test_a_collective_without_its_wait_reads_beyond_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d_functional.all_gather_into_tensor.default, (x, 2, "g"))
    last = graph.call_function(aten.sin.default, (launch,))
    graph.output(last)
    effects = Effects(graph)
    assert effects.is_in_flight(x) and effects.read_after(x, last)
    assert not effects.is_in_flight(last)


def test_a_wait_holds_the_memory_of_its_launch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(c10d_functional.all_reduce.default, (x, "sum", "g"))
    wait = graph.call_function(c10d_functional.wait_tensor.default, (launch,))
    update = graph.call_function(aten.mul_.Tensor, (wait, 2.0))
    reader = graph.call_function(aten.sin.default, (launch,))
    graph.output((update, reader))
    effects = Effects(graph)
    assert effects.same(launch, wait) and not effects.same(x, wait)
    assert Hazard(update, reader, "RAW") in hazards(graph)


def test_a_reshape_that_may_copy_reads() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.t.default, (x,))
    copied = graph.call_function(aten.reshape.default, (view, [12]))
    update = graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((copied, update))
    assert is_pure_view(view) and may_be_view(copied) and not is_pure_view(copied)
    assert Hazard(copied, update, "WAR") in hazards(graph)
    assert not any(hazard.earlier is view for hazard in hazards(graph))


def test_a_copy_reads_what_stays_around_a_view_and_no_more() -> None:
    graph = fx.Graph()
    x, value = graph.placeholder("x"), graph.placeholder("value")
    first = graph.call_function(aten.copy_.default, (x, value))
    row = graph.call_function(aten.select.int, (x, 0, 0))
    part = graph.call_function(aten.copy_.default, (row, value))
    graph.output((first, part))
    found = hazards(graph)
    assert Hazard(first, part, "RAW") in found
    again = graph.call_function(aten.copy_.default, (x, value))
    part.append(again)
    assert {hazard.kind for hazard in hazards(graph) if hazard.later is again} == {"WAW"}


def test_moving_a_reader_moves_the_last_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    early = graph.call_function(aten.sin.default, (x,))
    late = graph.call_function(aten.cos.default, (x,))
    graph.output((early, late))
    effects = Effects(graph)
    assert effects.read_after(x, early)
    early.prepend(late)
    effects.moved([late])
    assert not effects.read_after(x, early)


def test_joined_classes_are_read_by_the_readers_of_both() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.sin.default, (x,))
    b = graph.call_function(aten.cos.default, (a,))
    c = graph.call_function(aten.exp.default, (b,))
    d = graph.call_function(aten.exp.default, (c,))
    graph.output(d)
    effects = Effects(graph)
    assert not effects.read_after(a, b)
    effects.join(a, b)
    assert effects.read_after(a, b) and not effects.read_after(a, c)
    effects.join(c, a)
    assert effects.read_after(b, c) and not effects.read_after(b, d)


def test_an_update_through_a_dropout_that_drops_nothing_is_one_of_its_argument() -> None:
    for train in (False, True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        dropped = graph.call_function(aten.dropout.default, (x, 0.5, train))
        update = graph.call_function(aten.add_.Tensor, (dropped, 1))
        graph.output(update)
        assert Mutations(graph, {}).writers(x) == ([] if train else [update])
