"""Collectives inside torch.compile on two ranks: fused, waited for late, and eager's gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gloo import Pool
from graphopt import PassManager, PassRegistry, graph_optimization_pass
from graphopt.hooks import graph_kind, inductor_pass
from graphopt.manager import PassCallback, PassContext, PassRecord

PIPELINE = "comm_fusion_with_concat -> schedule_comm_wait"
LAYERS = 3


class Records(PassCallback):
    """What passes did to which kind of graph."""

    def __init__(self) -> None:
        self.found: list[tuple[str | None, PassRecord]] = []

    def after_pass(self, context: PassContext) -> None:
        self.found.append((graph_kind(context.gm), context.record))

    def of(self, kind: str, name: str) -> PassRecord:
        """The first record of a pass on a kind of graph."""
        return next(r for k, r in self.found if (k, r.name) == (kind, name))


class Averaged(torch.autograd.Function):
    """The identity, whose gradient is the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return functional.all_reduce(gradient / 2, "sum", dist.group.WORLD)


class Net(nn.Module):
    """Collectives in the forward, on activations, and in the backward, on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight, bias = Averaged.apply(layer.weight), Averaged.apply(layer.bias)
            x = F.relu(F.linear(x, weight, bias))
        rows, sums = (functional.all_reduce(y, "sum", dist.group.WORLD) for y in (x.sum(1), x * 2))
        return x.square().mean() + (rows + sums.sum(1)).square().mean()


def options_for(records: Records, lower: str | None) -> dict[str, Any]:
    manager = PassManager(PIPELINE, callbacks=[records])
    options: dict[str, Any] = {"pipeline": manager, "lower": lower}
    return options if lower is None else {**options, "compile_threads": 1}


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(x)
    if loss.requires_grad:  # not where the compiled function has called backward itself
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare(expected: list[Tensor], actual: list[Tensor], lower: str | None) -> None:
    assert len(expected) == len(actual) == 1 + 2 * LAYERS
    tolerance = {"rtol": 0.0, "atol": 0.0} if lower is None else {}
    torch.testing.assert_close(actual, expected, **tolerance)


def train_with_functional_collectives(rank: int, dynamic: bool) -> list[int]:
    """Returns how many collectives forward and backward had and have, and how many waits moved."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    twin, records = copy.deepcopy(model), Records()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch itself warns of while it compiles
        run = torch.compile(
            model, backend="graphopt", dynamic=dynamic, options=options_for(records, None)
        )
        torch.manual_seed(rank)
        for rows in (5, 6):
            x = torch.randn(rows, 8)
            compare(gradients(twin, twin, x), gradients(model, run, x), None)
    counts = []
    for kind in ("forward", "backward"):
        fusion = records.of(kind, "comm_fusion_with_concat")
        counts += [fusion.collectives_before, fusion.collectives_after]
    return [*counts, records.of("backward", "schedule_comm_wait").changes or 0]


def test_functional_collectives_are_fused(two_ranks: Pool) -> None:
    for result in two_ranks.run(train_with_functional_collectives, False):
        # The gradients of both sums are one bucket, those of all parameters another.
        assert result[:4] == [2, 1, 2 + 2 * LAYERS, 2]
        assert result[4] > 0


def test_collectives_of_dynamic_size_are_left_alone(two_ranks: Pool) -> None:
    for result in two_ranks.run(train_with_functional_collectives, True):
        assert result[:4] == [2, 2, 2 + 2 * LAYERS, 3]


def train_with_python_reducer(rank: int, lower: str | None) -> list[tuple[int, int]]:
    """Returns how many collectives each backward had and has."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    twin = DistributedDataParallel(copy.deepcopy(model))
    records = Records()
    settings = torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True)
    batches = [torch.randn(5, 8) + rank for _ in range(3)]
    expected = [gradients(twin, lambda x: twin(x).square().mean(), x) for x in batches]
    with settings, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch itself warns of while it compiles
        wrapped = DistributedDataParallel(model)

        def step(x: Tensor) -> Tensor:
            loss = wrapped(x).square().mean()
            loss.backward()
            return loss.detach()

        run = torch.compile(step, backend="graphopt", options=options_for(records, lower))
        for x, twins in zip(batches, expected, strict=True):
            compare(twins, gradients(wrapped, run, x), lower)
    return [
        (r.collectives_before, r.collectives_after)
        for kind, r in records.found
        if r.name == "comm_fusion_with_concat" and kind == "backward"
    ]


@pytest.mark.parametrize("lower", [None, "inductor"])
def test_gradients_of_the_python_reducer_are_fused(two_ranks: Pool, lower: str | None) -> None:
    for fusions in two_ranks.run(train_with_python_reducer, lower):
        assert set(fusions) == {(2 * LAYERS, 1)}


def uuids(rank: int) -> tuple[str, str]:
    """Of a pass that does not depend on the rank, and of one that does."""
    found = []
    for bakes_rank in (False, True):

        @graph_optimization_pass(registry=PassRegistry(), bakes_rank=bakes_rank)
        def pass_(gm: fx.GraphModule) -> None: ...

        found.append(inductor_pass(pass_).uuid())
    return found[0], found[1]


def test_ranks_share_no_code_that_has_the_rank_in_it(two_ranks: Pool) -> None:
    (free, baked), (other_free, other_baked) = two_ranks.run(uuids)
    assert free == other_free
    assert baked != other_baked


class Regressor(nn.Module):
    """A model of the user's: Dynamo does not compile torch's own classes under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def warnings_of_ddp(rank: int, form: str) -> list[str]:
    """What the backend says about DDP in three ways of compiling it."""
    torch._dynamo.reset()
    reduced = {"optimize_ddp": "python_reducer", "compiled_autograd": True}
    with (
        torch._dynamo.config.patch(**(reduced if form == "in the graph" else {})),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        options = {"options": {"lower": None}, "backend": "graphopt"}
        if form == "inside":
            wrapped: Any = DistributedDataParallel(torch.compile(Regressor(), **options))
        else:
            wrapped = DistributedDataParallel(Regressor())

        def step(x: Tensor) -> None:
            wrapped(x).square().mean().backward()

        if form == "around":
            wrapped = torch.compile(wrapped, **options)
        run = torch.compile(step, **options) if form == "in the graph" else step
        run(torch.randn(4, 8) + rank)
    return [str(w.message) for w in caught if "DistributedDataParallel averages" in str(w.message)]


def test_averages_outside_the_graph_are_warned_of(two_ranks: Pool) -> None:
    for form in ("around", "inside"):
        for (message,) in two_ranks.run(warnings_of_ddp, form):
            assert "python_reducer" in message and "graphopt.compile" in message
    assert two_ranks.run(warnings_of_ddp, "in the graph") == [[], []]
