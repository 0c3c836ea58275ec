"""When gradients of weights are computed: at once what is sent at once, later what is held back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.graph_utils import is_collective, is_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.schedule import defer_products, hasten
from sketch import Sketch, one_rank, targets
from zoo import OPTIMIZERS, train_step

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def backward(read_by: str = "launch", keeps: bool = True) -> fx.GraphModule:
    """Two products that are sent, the first of them last; its input lives on if `keeps`."""
    s = Sketch()
    x = s.input("x", 64, 4, kind="user_input")
    w = s.input("w", 4, 4, kind="parameter")
    a = s.call(aten.relu.default, x)
    read = w if read_by == "state" else a
    held = s.call(aten.mm.default, s.call(aten.t.default, read), read)
    b = s.call(aten.exp.default, x)
    first = s.call(aten.mm.default, s.call(aten.t.default, b), a if keeps else b)
    launches = [s.average(first), s.average(held)]
    update = s.call(aten.copy_.default, w, s.call(aten.add.Tensor, w, s.wait(launches[0])))
    results = [s.wait(launches[1]), *([held] if read_by == "user" else [])]
    return s.step(results, [update])


def launches(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(filter(is_collective, graph_module.graph.nodes))


def test_products_wait_for_their_launch() -> None:
    gm = backward()
    start = ["relu", "t", "mm", "exp", "t", "mm", "mul", "all_reduce", "mul", "all_reduce"]
    assert targets(gm)[:10] == start
    assert defer_products(gm.graph, launches(gm)[1:]) == 1
    start = ["relu", "t", "exp", "t", "mm", "mul", "all_reduce", "mm", "mul", "all_reduce"]
    assert targets(gm)[:10] == start
    gm.graph.lint()
    assert defer_products(gm.graph, launches(gm)[1:]) == 0


@pytest.mark.parametrize("read_by", ["user", "state"])
def test_products_stay(read_by: str) -> None:
    """Where somebody else reads one, or it reads a parameter that the step updates."""
    gm = backward(read_by)
    before = list(gm.graph.nodes)
    assert defer_products(gm.graph, launches(gm)[1:]) == 0
    assert list(gm.graph.nodes) == before


def test_products_stay_where_memory_would_grow() -> None:
    gm = backward(keeps=False)
    before = list(gm.graph.nodes)
    assert defer_products(gm.graph, launches(gm)[1:]) == 0
    assert list(gm.graph.nodes) == before


def test_gradients_of_weights_come_first() -> None:
    s = Sketch()
    x = s.input("x", 64, 4, kind="user_input")
    transposed = s.call(aten.t.default, x)
    incoming = s.call(aten.relu.default, x)
    outgoing = s.call(aten.mm.default, incoming, s.input("w", 4, 4, kind="parameter"))
    launch = s.average(s.call(aten.mm.default, transposed, incoming))
    gm = s.step([outgoing, s.wait(launch)])
    assert targets(gm)[:6] == ["t", "relu", "mm", "mm", "mul", "all_reduce"]
    assert hasten(gm.graph, {launch}) == 3
    assert targets(gm)[:6] == ["t", "relu", "mm", "mul", "all_reduce", "mm"]
    gm.graph.lint()
    assert hasten(gm.graph, {launch}) == 0


def test_no_launch_waits_for_the_inputs_of_the_next() -> None:
    gm = backward()
    assert hasten(gm.graph, set(launches(gm))) == 0


def products_and_launches(held_back: float) -> list[str]:
    """Which come when in the backward of four layers."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    optimizer = OPTIMIZERS["sgd-momentum-loop"](model.parameters())
    args = (model, optimizer, torch.randn(4, 8), torch.tensor([3, 5, 1, 0]))
    train_step(*args)
    found = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    gm = IterGraphModule(found.graph_module)
    moves = f"iter_move_grads_and_optimizers(held_back={held_back})"
    graphopt.PassManager(f"remove_copy_from_optimizer -> schedule_comm_wait -> {moves}").run(gm)
    kinds = {"mm": "product", "all_reduce": "launch"}
    order = [
        kind
        for node in gm.graph.nodes
        for name, kind in kinds.items()
        if is_operator(node.target, f"aten::{name}", f"_c10d_functional::{name}")
    ]
    return order[4:]  # without the products of the forward


def test_a_step() -> None:
    """Seven products in the backward: of weights and activations, but not of the input."""
    both = ["product", "launch", "product"]
    assert products_and_launches(0.0) == [*both, *both, *both, "product", "launch"]
    # The gradients of layers 3 and 1 (from 0) are sent at last, and computed then.
    held = ["product", "launch"]
    assert products_and_launches(0.5) == ["product", *both, "product", *held, *held, *held]
