"""Where an assumption fails, the other branch goes on from what has been computed by then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from operator import and_
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from gloo import Pool
from graphopt.branches.continuation import (
    NotSharedError,
    StoppedGraph,
    continuation_of,
    from_the_beginning,
)
from graphopt.branches.handing import handing_out
from graphopt.errors import AssumptionFailedError
from graphopt.host.decisions.assumptions import assumptions
from graphopt.tracing.call import Call
from test_decisions import left_by, same

Step = Callable[[nn.Module, Optimizer, Tensor], Any]
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
PRODUCTS = ("aten::mm", "aten::addmm")


class Net(nn.Module):
    """Has statistics that are updated, and draws, on both sides of what a step may ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).tanh(), 0.25))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().mean()


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and norm of a step whose update is left out where gradients are large."""
    loss = loss_of(model, x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 2:
        optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def by_norm(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Skips the update."""
    return clipped(model, optimizer, x)[0]


def by_loss(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Skips the backward, or not: whichever is captured first."""
    loss = loss_of(model, x)
    if loss < 1:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def keeps_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """What is shared stays in `.grad`, and is returned."""
    optimizer.zero_grad()
    h = model(x) - x[:, :2]
    h.square().mean().backward()
    if h.abs().max() < 2:
        optimizer.step()
    return h


def draws_in_both(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Draws before, in each branch, and after both."""
    h = F.dropout(model(x), 0.5)
    h = h * torch.rand_like(h) if h.sum() > 0 else F.dropout(h, 0.25) + torch.randn_like(h)
    loss = F.dropout(h, 0.125).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def asks_three_times(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The second decision comes after the first in either branch, the third after an update of
    gradients."""
    h = model(x) - x[:, :2]
    h = h * 2 if h.sum() > 0 else h - 1
    loss = F.dropout(h, 0.25).square().mean()
    if loss > 1:
        loss = loss.sqrt()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 4:
        optimizer.step()
    return loss


STEPS: list[Step] = [by_norm, by_loss, keeps_gradients, draws_in_both, asks_three_times]


def batches(calls: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [0.2, 0.2, 3.0, 0.2, 3.0, 3.0, 0.2, 1.0, 3.0, 0.2]
    return [
        torch.randn(8, 4, generator=generator) * sizes[call % len(sizes)] for call in range(calls)
    ]


def trained(
    step: Step, kind: str, compiled: bool, calls: int = 24, **options: Any
) -> tuple[list[Any], list[Counter[str]], list[bool]]:
    """What every call leaves, how often it calls some operators, and whether an assumption of a
    graph has failed in it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[kind](model)
    run: Any = graphopt.compile(step, **options) if compiled else step
    left: list[Any] = []
    called = []
    failed = []
    for x in batches(calls):
        before = {entry: entry.tries.failures for entry in run._entries} if compiled else {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = run(model, optimizer, x)
        called.append(Counter(e.name for e in profile.events() if e.name in PRODUCTS))
        left += [result, *left_by(model, optimizer)]
        failed.append(any(entry.tries.failures > was for entry, was in before.items()))
    return left, called, failed


@pytest.mark.covering(2)
@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_call_is_eager_s_and_computes_as_much(step: Step, kind: str, pipeline: str) -> None:
    expected, as_often, _ = trained(step, kind, compiled=False)
    found, called, failed = trained(step, kind, compiled=True, pipeline=pipeline)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    at_most = [one.total() <= other.total() for one, other in zip(called, as_often, strict=True)]
    assert not all(at_most)  # the first time, a branch begins from the beginning
    assert any(map(and_, failed, at_most))
    if step is not asks_three_times:  # all pairs of branches have been met by then
        assert any(failed[-8:])
        assert all(at_most[-8:])


def test_a_graph_that_is_compiled_goes_on_as_well() -> None:
    options = graphopt.lowering.Options(min_ops=2)
    expected, as_often, _ = trained(keeps_gradients, "momentum", compiled=False, calls=12)
    found, called, _ = trained(keeps_gradients, "momentum", compiled=True, calls=12, lower=options)
    close = [
        torch.allclose(a, b, rtol=1e-4, atol=1e-5) if isinstance(a, Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    ]
    assert all(close)
    assert [c["aten::addmm"] for c in called[-4:]] == [c["aten::addmm"] for c in as_often[-4:]]


def both_branches(
    step: Step, other: Step
) -> tuple[Callable[[], tuple[Any, list[Any]]], Callable[[], tuple[Any, list[Any]]]]:
    """The graphs of two branches, or of two steps, of the same objects: each gives the graph, and
    copies of its inputs."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model)
    small, large = batches(3)[0], batches(3)[2]

    def of(step: Step, x: Tensor) -> Callable[[], tuple[Any, list[Any]]]:
        run = graphopt.compile(step, pipeline="none")
        run(model, optimizer, x)
        entry = run._entries[0]
        call = Call(step, (model, optimizer, large), {})
        return lambda: (entry.module, [value.clone() for value in entry.values(call)])

    return of(step, small), of(other, large)


def test_what_is_left_goes_on_to_what_the_other_graph_computes() -> None:
    first, second = both_branches(by_loss, by_loss)
    (taken, values), (other, inputs) = first(), second()
    (assumption,) = assumptions(taken.graph)
    rest = continuation_of(StoppedGraph(taken.graph, from_the_beginning, assumption), other)
    handing, positions = handing_out(taken, assumption, rest.taken)
    torch.manual_seed(3)
    with pytest.raises(AssumptionFailedError) as failed:
        handing(*values)
    there = [failed.value.handed_out[position] for position in positions]
    found = rest.module.go_on(inputs, there)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    expected = other(*second()[1])
    assert torch.equal(after, torch.get_rng_state())
    assert len(found[0]) == len(expected[0]) == 1
    assert all(map(torch.equal, found[0], expected[0]))
    assert len(found[1]) == len(expected[1]) == 3  # the statistics
    assert all(map(torch.equal, found[1], expected[1]))
    names = {str(node.target) for node in rest.module.graph.nodes}
    assert not any("mm" in name or "bernoulli" in name for name in names)


def draws_otherwise(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """The beginning of another step: the same, after a number was drawn."""
    factor = torch.rand(())
    return by_norm(model, optimizer, x) * factor


def multiplies(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Another step, that has nothing but the question in common."""
    if x.sum() > 100:
        optimizer.zero_grad()
    return x * 2


@pytest.mark.parametrize("step", [draws_otherwise, multiplies])
def test_what_is_not_the_same_is_not_shared(step: Step) -> None:
    first, second = both_branches(by_norm, step)
    (taken, _), (other, _) = first(), second()
    (assumption,) = assumptions(taken.graph)
    with pytest.raises(NotSharedError):
        continuation_of(StoppedGraph(taken.graph, from_the_beginning, assumption), other)


# ---------------------------------------------------------------------------------- several ranks


def average_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return clipped(model, optimizer, x)[1]


def by_one_gradient(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Decides when all other gradients may still be under way between the ranks."""
    loss_of(model, x).backward()
    last = next(p for p in reversed(list(model.parameters())) if p.shape == (2,))
    assert last.grad is not None
    norm = last.grad.norm()
    if norm < 1:
        optimizer.step()
    optimizer.zero_grad()
    return norm


def by_all_losses(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """No rank updates where the loss of one is large."""
    loss = loss_of(model, x)
    loss.backward()
    large = (loss.detach() > 1).float()
    dist.all_reduce(large)
    if large == 0:
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_a_part(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """What is beside the part that is reduced is another number on each rank."""
    sums = x.sum(0)
    dist.all_reduce(sums[1:])
    if sums.sum() > 0:
        optimizer.zero_grad()
    return sums


def _on_rank(
    rank: int, step: Step, compiled: bool, pipeline: str, uneven: bool
) -> tuple[list[Any], list[int], list[bool]]:
    """What every call leaves on one rank; of one that is compiled, how many reductions it launches,
    and whether an assumption fails."""
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["momentum"](model)
    run: Any = graphopt.compile(step, pipeline=pipeline) if compiled else step
    used = model if compiled else nn.parallel.DistributedDataParallel(model)
    left: list[Any] = []
    launched, failures = [], []
    for call, x in enumerate(batches(20, seed=rank)):
        # Another length on one rank, for which it has graphs of its own.
        x = x[:5] if uneven and rank == 1 and call % 4 == 2 else x
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiled = torch.profiler.profile(activities=activities) if compiled else nullcontext()
        with profiled as profile:
            result = run(used, optimizer, x)
        if profile is not None:
            names = [e.name for e in profile.events()]
            failures.append("c10d::allreduce_" in names)  # by which ranks say that they go on
            launched.append(sum(name.startswith("_c10d_functional::all_reduce") for name in names))
        left += [result, *left_by(model, optimizer)]
    return left, launched, failures


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_ranks_launch_each_collective_once(two_ranks: Pool, pipeline: str, uneven: bool) -> None:
    expected = two_ranks.run(_on_rank, average_step, False, pipeline, uneven)
    found = two_ranks.run(_on_rank, average_step, True, pipeline, uneven)
    for (left, launched, failures), (eager, _, _) in zip(found, expected, strict=True):
        assert len(left) == len(eager)
        assert all(map(same, left, eager))
        # Each call launches as much, whether its assumption holds or not.
        assert any(failures[-10:])
        assert launched[-1] > 0
        assert uneven or set(launched[-10:]) == {launched[-1]}


def test_ranks_decide_by_what_they_have_reduced_in_place(two_ranks: Pool) -> None:
    expected = two_ranks.run(_on_rank, by_all_losses, False, "default", True)
    found = two_ranks.run(_on_rank, by_all_losses, True, "default", True)
    for (left, _, failures), (eager, _, _) in zip(found, expected, strict=True):
        assert any(failures)
        assert len(left) == len(eager)
        assert all(map(same, left, eager))


def test_ranks_decide_by_a_value_of_which_a_part_is_reduced(two_ranks: Pool) -> None:
    expected = two_ranks.run(_on_rank, by_a_part, False, "default", False)
    found = two_ranks.run(_on_rank, by_a_part, True, "default", False)
    for (left, _, _), (eager, _, _) in zip(found, expected, strict=True):
        assert len(left) == len(eager)
        assert all(map(same, left, eager))


@pytest.mark.parametrize("pipeline", ["default", "none"])
def test_ranks_agree_where_collectives_may_be_under_way(two_ranks: Pool, pipeline: str) -> None:
    expected = two_ranks.run(_on_rank, by_one_gradient, False, pipeline, True)
    found = two_ranks.run(_on_rank, by_one_gradient, True, pipeline, True)
    for (left, _, failures), (eager, _, _) in zip(found, expected, strict=True):
        assert any(failures[-10:])
        assert len(left) == len(eager)
        assert all(map(same, left, eager))
