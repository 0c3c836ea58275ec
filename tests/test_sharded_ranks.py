"""Steps with sharded parameters on real gloo ranks: in buckets, bit for bit like eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from graphopt import PassManager, PassRegistry, graph_optimization_pass
from graphopt.comm import kind_of
from graphopt.cost import NETWORKS, CostModel
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.hooks import graph_kind
from graphopt.manager import PassCallback, PassContext
from graphopt.schedule import Schedule, apply_schedule, program_of
from graphopt.schedule.bucketing import bucket_kind
from graphopt.schedule.buckets import BucketChooser, side_by_side
from graphopt.schedule.constraints import predecessors
from graphopt.schedule.list_scheduler import ListScheduler
from graphopt.schedule.overlap import POLICIES
from graphopt.schedule.tables import ProgramTables

c10d = torch.ops._c10d_functional

STEPS = 3
WIDTHS = (5, 3, 4, 2)
"""Of layers, times the number of ranks: shards are uneven."""
CHOSEN = [("schedule_overlap", {"max_mb": 64.0})]


class Gathered(torch.autograd.Function):
    """A parameter from everybody's rows of it; its gradient is summed, and everybody has rows."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: str) -> Tensor:
        ctx.group, size = group, dist.get_world_size()
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, size, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        whole, size = gradient.contiguous(), dist.get_world_size()
        launched = c10d.reduce_scatter_tensor(whole, "sum", size, ctx.group)
        return c10d.wait_tensor(launched), None


class Sharded(nn.Module):
    """Layers of which each rank has rows: every other bias belongs to a group of its own, and one
    layer computes in double precision."""

    def __init__(self) -> None:
        super().__init__()
        size = dist.get_world_size()
        everybody = (dist.group.WORLD, dist.new_group(list(range(size))))
        self.groups = tuple(group.group_name for group in everybody)
        sizes = [size * width for width in WIDTHS]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for index, (wide, narrow) in enumerate(zip(sizes, (8, *sizes[:-1]), strict=True)):
            dtype = torch.float64 if index == 1 else torch.float32
            self.weights.append(nn.Parameter(torch.randn(wide // size, narrow, dtype=dtype)))
            self.biases.append(nn.Parameter(torch.randn(wide // size, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            full = Gathered.apply(weight, self.groups[0])
            shift = Gathered.apply(bias, self.groups[index % 2])
            x = torch.tanh(nn.functional.linear(x.to(full.dtype), full, shift))
        return x.square().mean()


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def all_in_buckets(gm: fx.GraphModule) -> int:
    """Gathers and scatters in one bucket for each kind of the forward and of the backward, where
    that is possible, whether or not it gains."""
    costs = CostModel(lambda node: 1e-6, NETWORKS["infiniband"])
    program, before = program_of(gm.graph, costs), predecessors(gm.graph)
    chooser = BucketChooser(program, before, costs)
    buckets = chooser.choose(0.0)
    assert all(len({bucket_kind(node) for node in bucket}) == 1 for bucket in buckets)
    planned, needed = chooser.planned(buckets)
    tables = ProgramTables(planned, needed)
    order = ListScheduler(tables, POLICIES[0], float("inf")).run()
    schedule = Schedule(tuple(side_by_side(order, planned.messages)), buckets)
    schedule.check(before)
    return apply_schedule(gm.graph, schedule)


def sent(graph: fx.Graph) -> dict[str, list[int]]:
    """How many tensors each collective sends, by name."""
    found: dict[str, list[int]] = {}
    for node in find_nodes(graph, is_collective):
        count = len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
        name = kind_of(node).removesuffix("_coalesced")
        found.setdefault(name, []).append(count)
    return {name: sorted(counts) for name, counts in found.items()}


def train(rank: int, pipeline: Any, lower: str | None) -> dict[str, list[int]]:
    """Trains next to eager, bit for bit; returns what is sent."""
    torch.manual_seed(rank)
    model = Sharded()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    if pipeline == "all":
        pipeline = [graph_optimization_pass(registry=PassRegistry())(all_in_buckets)]
    compiled = graphopt.compile(step, pipeline=pipeline, parallel=graphopt.Manual(), lower=lower)
    for _ in range(STEPS):
        x = torch.randn(6, 8)
        ours, theirs = compiled(model, optimizers[0], x), step(twin, optimizers[1], x)
        _compare([ours], [theirs], lower)
    compiled.flush()
    _compare(list(model.parameters()), list(twin.parameters()), lower)
    return sent(compiled.graph_module.graph)


def _compare(ours: list[Tensor], theirs: list[Tensor], lower: str | None) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if lower is None else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **tolerance)


def check_buckets(found: dict[str, list[int]]) -> None:
    """Of the forward: of float32 in one group 3 weights and 2 biases, in the other a bias; of
    float64 a weight, and a bias in the other group. The backward gathers nothing again."""
    assert found == {"all_gather_into_tensor": [1, 1, 1, 5], "reduce_scatter_tensor": [1, 1, 1, 5]}


def test_two_ranks(two_ranks: Pool) -> None:
    for found in two_ranks.run(train, "all", None):
        check_buckets(found)


def test_three_ranks(three_ranks: Pool) -> None:
    """A reduction adds what it added alone, in the same order."""
    for found in three_ranks.run(train, "all", None):
        check_buckets(found)


def test_lowered(two_ranks: Pool) -> None:
    for found in two_ranks.run(train, "all", "inductor"):
        check_buckets(found)


def test_the_pass_chooses(three_ranks: Pool) -> None:
    """By presets: gathers gain, scatters of gloo do not."""
    for found in three_ranks.run(train, CHOSEN, None):
        assert max(found["all_gather_into_tensor"]) > 1
        assert set(found["reduce_scatter_tensor"]) == {1}


# Inside torch.compile


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class Sent(PassCallback):
    """What each kind of graph sends after the last pass."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[int]]] = {}

    def after_pass(self, context: PassContext) -> None:
        self.found[str(graph_kind(context.gm))] = sent(context.gm.graph)


def train_in_hooks(rank: int, pipeline: Any, lower: str | None) -> dict[str, dict[str, list[int]]]:
    """Returns what forward and backward send."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Sharded()
    twin = copy.deepcopy(model)
    if pipeline == "all":
        pipeline = [graph_optimization_pass(registry=PassRegistry())(all_in_buckets)]
    records = Sent()
    manager = PassManager(pipeline, callbacks=[records])
    options: dict[str, Any] = {"pipeline": manager, "lower": lower}
    if lower is not None:
        options["compile_threads"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch itself warns of while it compiles
        run = torch.compile(model, backend="graphopt", options=options)
        for _ in range(2):
            x = torch.randn(6, 8)
            _compare(gradients(model, run, x), gradients(twin, twin, x), lower)
    return records.found


@pytest.mark.parametrize("lower", [None, "inductor"])
def test_in_the_graphs_of_torch_compile(lower: str | None, two_ranks: Pool) -> None:
    for found in two_ranks.run(train_in_hooks, "all", lower):
        assert max(found["forward"]["all_gather_into_tensor"]) == 5
        assert max(found["backward"]["reduce_scatter_tensor"]) == 5


def test_the_pass_chooses_in_the_graphs_of_torch_compile(two_ranks: Pool) -> None:
    for found in two_ranks.run(train_in_hooks, CHOSEN, None):
        assert max(found["forward"]["all_gather_into_tensor"]) > 1
        assert set(found["backward"]["reduce_scatter_tensor"]) == {1}
