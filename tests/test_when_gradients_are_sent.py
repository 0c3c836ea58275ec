"""When gradients are computed and sent: deferred, how many at once, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.cost import Collective, CostModel, Transfer, default_cost_model
from graphopt.graph_utils import find_nodes, is_collective, is_operator
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import comm_fusion_with_concat
from graphopt.schedule import collectives_by_cost
from graphopt.schedule.deferral import defer_products, hasten
from graphopt.schedule.granularity import MOST
from graphopt.schedule.launch_order import Send, hold_back
from sketch import Sketch, gradients, one_rank, targets
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


def costs(compute: float, overhead: float, latency: float = 0.0) -> CostModel:
    """A model of constants; every collective takes a second on the link."""

    def transfer(collective: Collective) -> Transfer:
        return Transfer(latency, 1.0, overhead=overhead)

    return CostModel(lambda node: compute if node.op == "output" else 0.0, transfer)


@pytest.mark.parametrize(
    ("compute", "overhead", "latency", "count"),
    [
        (100.0, 1.0, 0.0, 8),
        (100.0, 0.5, 0.5, 8),
        (1.0, 4.0, 0.0, 1),  # rather one than half of one
        (100.0, 0.0, 0.0, MOST),
        (1e9, 1.0, 0.0, MOST),
        (0.0, 1.0, 0.0, 1),
    ],
)
def test_count(compute: float, overhead: float, latency: float, count: int) -> None:
    gm = gradients((4,), (4,))
    launches = find_nodes(gm.graph, is_collective)
    assert collectives_by_cost(gm.graph, launches, costs(compute, overhead, latency)) == count
    assert collectives_by_cost(gm.graph, [], costs(compute, overhead, latency)) == 1


def buckets_of(width: int, rows: int, layers: int = 12) -> list[int]:
    """Bytes of the buckets by cost of a model of equal layers."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.ones(rows, width)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    parallel = graphopt.DataParallel()
    captured = graphopt.capture(step, model, optimizer, inputs, parallel=parallel)
    comm_fusion_with_concat(captured.graph_module, min_buckets=None)
    return [block.nbytes for block in get_all_comm_blocks(captured.graph_module)]


def test_little_compute_has_few_collectives_and_much_has_many() -> None:
    few, some, many = buckets_of(512, 8), buckets_of(512, 512), buckets_of(1024, 16384)
    assert len(few) < len(some) <= len(many)
    assert len(few) <= 6
    assert max(many) <= 5 * 2**20


def test_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither times of today nor threads of this machine decide."""
    gm = gradients((2**18,), (2**18,))
    launches = find_nodes(gm.graph, is_collective)
    first = collectives_by_cost(gm.graph, launches, default_cost_model(gm.graph))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert collectives_by_cost(gm.graph, launches, default_cost_model(gm.graph)) == first


def sends(sizes: list[int]) -> list[Send]:
    """As a backward makes them: what is made last is needed first."""
    graph = fx.Graph()
    launches = [graph.placeholder(f"g{i}") for i in range(len(sizes))]
    count = len(sizes)
    return [
        Send(n, size, count - i) for i, (n, size) in enumerate(zip(launches, sizes, strict=True))
    ]


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.floats(0, 0.99, allow_nan=False)
)
def test_order(sizes: list[int], share: float) -> None:
    given_sends = sends(sizes)
    order = hold_back(given_sends, share)
    assert sorted(order.sends, key=given_sends.index) == given_sends
    assert order.at_once[-1] is given_sends[-1]
    assert list(order.at_once) == [s for s in given_sends if s in order.at_once]
    assert [s.due for s in order.held] == sorted(s.due for s in order.held)
    held = sum(send.nbytes for send in order.held)
    assert abs(held - share * sum(sizes[:-1])) <= max(sizes) + 1


def test_a_third_of_equal_sizes() -> None:
    given_sends = sends([4] * 8)
    order = hold_back(given_sends, 1 / 3)
    assert [given_sends.index(send) for send in order.sends] == [0, 2, 3, 5, 6, 7, 4, 1]
    assert hold_back(given_sends, 0).held == ()


def test_what_some_rank_waits_for_is_sent_at_once() -> None:
    """Those beside it take its share."""
    given_sends = sends([4] * 8)
    given_sends[1] = replace(given_sends[1], now=True)
    order = hold_back(given_sends, 1 / 3)
    assert [given_sends.index(send) for send in order.sends] == [0, 1, 3, 5, 6, 7, 4, 2]
