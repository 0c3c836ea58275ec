"""Ranks without processes: their collectives exchange values as real ones do, and a pass that
communicates wrongly is found out."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import gloo
import graphopt
from graphopt.comm import get_all_comm_blocks, parameters_of
from graphopt.errors import CollectiveError
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator, is_wait
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphopt.replicas import Lockstep
from graphopt.testing import FakeRanks, StepUnderTest, fake_ranks
from sketch import Sketch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Step = tuple[Callable[..., Any], tuple[Any, ...]]


class Net(nn.Module):
    """Linear layers, dropout and BatchNorm, whose buffers are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.25))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def case(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Step:
    torch.manual_seed(0)
    model = Net()
    batch = torch.randn(5, 6), torch.randint(0, 3, (5,))
    return step, (model, optimizer(model.parameters(), lr=0.05, **options), *batch)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
]


@cache
def captured(number: int, warm: bool) -> StepUnderTest:
    """The step with one of `OPTIMIZERS`, captured once for all tests; in `fake_ranks(3)`."""
    optimizer, options = OPTIMIZERS[number]
    function, args = case(optimizer, **options)
    before = copy.deepcopy(args[0].state_dict())
    found = StepUnderTest(function, args, warm=warm)
    assert all(torch.equal(v, before[name]) for name, v in args[0].state_dict().items())
    assert not args[1].state
    return found


def declared(function: Callable[..., Any], **constraints: Any) -> Pass:
    return graph_optimization_pass(registry=PassRegistry(), **constraints)(function)


@pytest.fixture
def ranks() -> Iterator[FakeRanks]:
    with fake_ranks(3) as found:
        yield found


def collectives(rank: int, world: int) -> fx.GraphModule:
    """One collective of each kind, several of them in one graph."""
    s = Sketch()
    x, wide = s.input("x", 2, 3), s.input("wide", 2 * world, 3)
    name = "0"
    launched = [
        s.call(c10d.all_reduce.default, x, "sum", name),
        s.call(c10d.all_reduce.default, x, "avg", name),
        s.call(c10d.all_reduce.default, x, "max", name),
        s.call(c10d.all_reduce.default, x, "min", name),
        s.call(c10d.all_reduce.default, x, "product", name),
        s.call(c10d.broadcast.default, x, world - 1, name),
        s.call(c10d.all_gather_into_tensor.default, x, world, name),
        s.call(c10d.reduce_scatter_tensor.default, wide, "sum", world, name),
        s.call(c10d.all_to_all_single.default, wide, [2] * world, [2] * world, name),
    ]
    both = s.call(c10d.all_reduce_coalesced.default, [x, wide], "sum", name)
    launched += [s.call(operator.getitem, both, index) for index in range(2)]
    return s.step([s.wait(launch) for launch in launched])


def inputs_of(rank: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, 3, generator=generator) for size in (2, 2 * world)]


def on_real_ranks(rank: int, world: int) -> list[Tensor]:
    results, _, _ = collectives(rank, world)(*inputs_of(rank, world))
    return [result.clone() for result in results]


def test_collectives_give_what_real_ranks_get(two_ranks: gloo.Pool) -> None:
    expected = two_ranks.run(on_real_ranks, 2)
    lockstep = Lockstep(2, {"0": [0, 1]})
    returned = lockstep.run(collectives(0, 2), [inputs_of(rank, 2) for rank in range(2)])
    for (results, _, _), theirs in zip(returned, expected, strict=True):
        for result, real in zip(results, theirs, strict=True):
            assert torch.equal(result, real)


def in_place() -> fx.GraphModule:
    s = Sketch()
    x, y = s.input("x", 2), s.input("y", 6)
    summed = s.wait(s.call(c10d.all_reduce_.default, x, "sum", "0"))
    sent = s.wait(s.call(c10d.broadcast_.default, y, 1, "0"))
    return s.step([summed, sent])


def test_variants_in_place_write_to_what_they_are_given(ranks: FakeRanks) -> None:
    inputs = [[torch.full((2,), float(rank)), torch.full((6,), float(rank))] for rank in range(3)]
    ranks.run(in_place(), inputs)
    for x, y in inputs:
        assert x.tolist() == [3.0] * 2
        assert y.tolist() == [1.0] * 6


def test_groups_of_some_ranks_stand_for_their_shifted_copies() -> None:
    s = Sketch()
    x = s.input("x", 1)
    graph = s.step([s.wait(s.all_reduce(x, group=name)) for name in ("near", "far")])
    lockstep = Lockstep(4, {"near": [0, 1], "far": [0, 2]})
    returned = lockstep.run(graph, [[torch.tensor([10.0**rank])] for rank in range(4)])
    found = [[result.item() for result in results] for results, _, _ in returned]
    assert found == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]
    with pytest.raises(CollectiveError, match="do not divide into such groups"):
        Lockstep(3, {"near": [0, 1], "far": [0, 2]}).run(graph, [[torch.ones(1)]] * 3)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (lambda s, x: s.all_reduce(x, "geometric"), "no reduction 'geometric'"),
        (lambda s, x: s.all_reduce(x, group="nowhere"), "no process group 'nowhere'"),
        (
            lambda s, x: s.call(c10d.all_gather_into_tensor.default, x, 2, "0"),
            "group_size=2, but its group has 3 ranks",
        ),
    ],
)
def test_wrong_collectives(
    ranks: FakeRanks, launch: Callable[[Sketch, fx.Node], fx.Node], message: str
) -> None:
    s = Sketch()
    graph = s.step([s.wait(launch(s, s.input("x", 2)))])
    with pytest.raises(CollectiveError, match=message):
        ranks.run(graph, [[torch.ones(2)] for _ in range(3)])


def test_ranks_that_send_other_shapes(ranks: FakeRanks) -> None:
    s = Sketch()
    graph = s.step([s.wait(s.all_reduce(s.input("x", 2)))])
    with pytest.raises(CollectiveError, match=r"rank 1 sends torch.float32 of shape \[1\]"):
        ranks.run(graph, [[torch.ones(2 - rank % 2)] for rank in range(3)])


def test_misuse() -> None:
    for count in (1, 0, -2, True, 2.0):
        with pytest.raises(ValueError, match="at least 2"), fake_ranks(count):  # type: ignore[arg-type]
            pass
    with fake_ranks(2) as outer:
        with pytest.raises(CollectiveError, match="already"), fake_ranks(3):
            pass
        with pytest.raises(ValueError, match="1 ranks are given, there are 2"):
            outer.run(in_place(), [[torch.ones(2), torch.ones(6)]])
    assert not dist.is_initialized()


def test_steps_do_not_wait_for_ranks_that_are_not_there(ranks: FakeRanks) -> None:
    function, args = case()
    with pytest.raises(CollectiveError, match=r"graphopt\.testing\.check_pass"):
        graphopt.compile(function)(*args)


def average_twice(gm: fx.GraphModule) -> int:
    """Divide by the number of ranks what is averaged already."""
    wait = find_nodes(gm.graph, is_wait)[-1]
    with gm.graph.inserting_after(wait):
        halved = call_function_with_meta(gm.graph, aten.mul.Tensor, (wait, 1 / 3), like=wait)
    wait.replace_all_uses_with(halved, delete_user_cb=lambda user: user is not halved)
    return 1


def lose_average(gm: fx.GraphModule) -> int:
    """Let one rank's gradient pass for the average."""
    block = get_all_comm_blocks(gm, "all_reduce")[-1]
    (wait,) = block.wait_nodes
    wait.replace_all_uses_with(block.inputs[0])
    return 1


def lose_factor(gm: fx.GraphModule) -> int:
    """Sum in place of averaging."""
    block = get_all_comm_blocks(gm, "all_reduce")[-1]
    scaled = block.inputs[0]
    block.comm_node.replace_input_with(scaled, scaled.args[0])
    return 1


def reduce_again(gm: fx.GraphModule) -> int:
    """Sum what is a sum already."""
    wait = get_all_comm_blocks(gm, "all_reduce")[-1].wait_nodes[0]
    with gm.graph.inserting_after(wait):
        launch = call_function_with_meta(
            gm.graph, c10d.all_reduce.default, (wait, "sum", "0"), like=wait
        )
    with gm.graph.inserting_after(launch):
        again = call_function_with_meta(gm.graph, c10d.wait_tensor.default, (launch,), like=wait)
    wait.replace_all_uses_with(again, delete_user_cb=lambda user: user is not launch)
    return 1


def take_maximum(gm: fx.GraphModule) -> int:
    """Another reduction."""
    get_all_comm_blocks(gm, "all_reduce")[-1].comm_node.update_arg(1, "max")
    return 1


SAID = {
    average_twice: "an average over 3 ranks is divided by 3 twice?",
    lose_average: "lose_average lets ranks differ",
    lose_factor: "a sum over 3 ranks that is not divided, or is made twice?",
    reduce_again: "a sum over 3 ranks that is not divided, or is made twice?",
    take_maximum: "take_maximum changes",
}


@pytest.mark.parametrize("wrong", SAID)
@pytest.mark.parametrize("optimizer", [1, 2])
def test_wrong_communication_shows_though_numerics_may_change(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch, optimizer: int, wrong: Callable[..., Any]
) -> None:
    """Numbers decide here, before any check of the graph could."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")
    chosen = declared(wrong, changes_numerics=True)
    with pytest.raises(AssertionError) as caught:
        captured(optimizer, False).check(chosen, idempotent=False)
    assert SAID[wrong] in str(caught.value)


def compress(gm: fx.GraphModule) -> int:
    """Send gradients as bfloat16."""
    changed = 0
    for block in get_all_comm_blocks(gm, "all_reduce"):
        (sent,), (wait,) = block.inputs, block.wait_nodes
        if block.dtype != torch.float32:
            continue
        with gm.graph.inserting_before(block.comm_node):
            half = call_function_with_meta(
                gm.graph, aten._to_copy.default, (sent,), {"dtype": torch.bfloat16}, like=sent
            )
            launch = call_function_with_meta(
                gm.graph, c10d.all_reduce.default, (half, *block.comm_node.args[1:]), like=sent
            )
        with gm.graph.inserting_before(wait):
            waited = call_function_with_meta(
                gm.graph, c10d.wait_tensor.default, (launch,), like=wait
            )
            whole = call_function_with_meta(
                gm.graph, aten._to_copy.default, (waited,), {"dtype": torch.float32}, like=wait
            )
        wait.replace_all_uses_with(whole)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(block.comm_node)
        changed += 1
    return changed


@pytest.mark.parametrize(("optimizer", "warm"), [(0, False), (1, True), (2, False), (2, True)])
def test_compression_passes(ranks: FakeRanks, optimizer: int, warm: bool) -> None:
    captured(optimizer, warm).check(declared(compress, changes_numerics=True), changes=6)


def test_warm_state_is_that_after_a_step(ranks: FakeRanks) -> None:
    kinds = [
        [node.meta.get("kind") for node in captured(2, warm).graph_module.graph.nodes]
        for warm in (False, True)
    ]
    assert "optimizer_state" not in kinds[0]
    assert kinds[1].count("optimizer_state") == 3 * 6


def test_shipped_passes_one_capture(ranks: FakeRanks) -> None:
    under_test = captured(2, True)
    torch.rand(3)  # what is drawn in between does not matter
    for name in ("comm_fusion_with_concat", "schedule_comm_wait"):
        assert under_test.check(name).changed
    under_test.check("remove_copy_from_optimizer", changes=0)
    assert under_test.check("iter_move_grads_and_optimizers").changed


def test_late_work_runs_on_all_ranks(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is late takes the averages of its own iteration, not those of the next."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")

    def own_gradients(gm: IterGraphModule) -> None:
        for block in get_all_comm_blocks(gm, "all_reduce"):
            block.wait_nodes[0].replace_all_uses_with(block.inputs[0])
            for node in (*block.wait_nodes, block.comm_node):
                gm.graph.erase_node(node)

    with pytest.raises(AssertionError, match="lets ranks differ"):
        captured(1, True).check(
            declared(own_gradients, prerequisites=["iter_move_grads_and_optimizers"]),
            idempotent=False,
        )


def test_a_gradient_of_rounding_errors_is_not_scaled_either(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm takes out what a bias before it adds: its gradient is next to nothing."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")

    def average_bias_twice(gm: fx.GraphModule) -> None:
        (block,) = (
            b
            for b in get_all_comm_blocks(gm, "all_reduce")
            if parameters_of(gm, b) == ("first.bias",)
        )
        with gm.graph.inserting_before(block.comm_node):
            half = call_function_with_meta(gm.graph, aten.mul.Tensor, (block.inputs[0], 1 / 3))
        block.comm_node.replace_input_with(block.inputs[0], half)

    chosen = declared(average_bias_twice, changes_numerics=True)
    with pytest.raises(AssertionError, match="is divided by 3 twice"):
        captured(1, False).check(chosen, idempotent=False)


def test_a_graph_that_fails_names_the_node(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")

    def breaks(gm: fx.GraphModule) -> None:
        launch = get_all_comm_blocks(gm, "all_reduce")[0].comm_node
        launch.update_arg(1, "sideways")

    def misfits(gm: fx.GraphModule) -> None:
        find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::addmm"))[0].update_arg(0, 3.0)

    for wrong, said in ((breaks, "no reduction 'sideways'"), (misfits, "%addmm")):
        with pytest.raises(
            AssertionError, match=f"{wrong.__name__} leaves fails when it runs"
        ) as e:
            captured(0, False).check(declared(wrong), idempotent=False)
        assert said in str(e.value)


def test_random_numbers_differ_between_ranks_and_not_between_runs(ranks: FakeRanks) -> None:
    s = Sketch()
    x = s.input("x", 1000)
    drawn = s.step([s.call(aten.bernoulli.p, x, 0.5)])
    state = torch.get_rng_state()
    first = [results[0] for results, _, _ in ranks.run(drawn, [[torch.ones(1000)]] * 3)]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    torch.set_rng_state(state)
    again = [results[0] for results, _, _ in ranks.run(drawn, [[torch.ones(1000)]] * 3)]
    assert all(map(torch.equal, first, again))


def test_callbacks_are_called_for_rank_0() -> None:
    seen: list[float] = []

    def logged(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).sum()
        graphopt.callback(seen.append, loss.detach())
        loss.backward()
        return loss

    with fake_ranks(2) as ranks:
        model = nn.Linear(2, 1)
        graph = graphopt.capture(logged, model, torch.ones(1, 2)).graph_module
        inputs = [list(map(torch.clone, model.parameters())) for _ in range(2)]
        (first, _, _), _ = ranks.run(
            graph,
            [
                [*map(Tensor.detach, own), torch.full((1, 2), 1.0 + rank)]
                for rank, own in enumerate(inputs)
            ],
        )
    assert [float(value) for value in seen] == [float(first[0])]
