"""What a sharded step reads of parameters behind their update, as averages and logged numbers do,
bit for bit as DDP does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import graphopt
from gloo import Pool
from graphopt.graph_utils import is_collective
from twins import SEED

Run = Callable[[nn.Module, nn.Module, Optimizer, nn.Module, Tensor], Any]


def made() -> tuple[nn.Module, Optimizer, nn.Module]:
    torch.manual_seed(SEED)
    inner = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU())
    model = nn.Sequential(*inner, nn.Linear(128, 67))
    average = copy.deepcopy(model).requires_grad_(False)
    return model, AdamW(model.parameters(), lr=1e-2, foreach=False), average


def updated(net: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# What stands behind the update, or around it. `net` is what is called, `model` has the parameters.


def nothing(net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor) -> Any:
    return updated(net, opt, x)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module) -> None:
    for held, new in zip(average.parameters(), model.parameters(), strict=True):
        held.mul_(0.9).add_(new, alpha=0.1)


def averaged(
    net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor
) -> Any:
    loss = updated(net, opt, x)
    follow(average, model)
    return loss


def averaged_in_lists(
    net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor
) -> Any:
    loss = updated(net, opt, x)
    with torch.no_grad():
        held = list(average.parameters())
        torch._foreach_mul_(held, 0.9)
        torch._foreach_add_(held, list(model.parameters()), alpha=0.1)
    return loss


def average_logged(
    net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor
) -> Any:
    """The average is read before it follows, and after it."""
    before = torch.stack([each.std() for each in average.parameters()])
    loss = updated(net, opt, x)
    follow(average, model)
    return loss, before, torch.stack([each.std() for each in average.parameters()])


def logged(net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor) -> Any:
    loss = updated(net, opt, x)
    spread = [each.detach().std() for each in model.parameters()]
    return (
        loss,
        torch.stack(spread),
        torch.stack([each.detach().sum() for each in average.parameters()]),
    )


def clipped(net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor) -> Any:
    loss = updated(net, opt, x)
    with torch.no_grad():
        for each in model.parameters():
            each.clamp_(-0.05, 0.05)
    return loss


def scaled_before(
    net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor
) -> Any:
    """Parameters are written in front of the forward that reads them."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.99)
    return updated(net, opt, x)


def evaluated(
    net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor
) -> Any:
    loss = updated(net, opt, x)
    follow(average, model)
    with torch.no_grad():
        return loss, model(x), average(x)


def twice(net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor) -> Any:
    return updated(net, opt, x), updated(net, opt, x.flip(0))


READS: dict[str, Run] = {
    read.__name__: read
    for read in (
        nothing,
        averaged,
        averaged_in_lists,
        average_logged,
        logged,
        clipped,
        scaled_before,
        evaluated,
        twice,
    )
}


def norms(net: nn.Module, model: nn.Module, opt: Optimizer, average: nn.Module, x: Tensor) -> Any:
    loss = updated(net, opt, x)
    return loss, torch.stack([each.detach().norm() for each in model.parameters()])


def compiled(read: Run, reached: str, **options: Any) -> tuple[Any, Callable[[Tensor], Any], Any]:
    """A step that reaches its model, optimizer and average as arguments, from outside, or both."""
    model, optimizer, average = made()
    if reached == "arguments":
        step = graphopt.compile(lambda m, o, a, x: read(m, m, o, a, x), **options)
        return step, lambda x: step(model, optimizer, average, x), (model, average)
    if reached == "model an argument":
        step = graphopt.compile(lambda m, x: read(m, m, optimizer, average, x), **options)
        return step, lambda x: step(model, x), (model, average)
    step = graphopt.compile(lambda x: read(model, model, optimizer, average, x), **options)
    return step, step, (model, average)


def train(rank: int, read: Run, reached: str, stage: int, pipeline: str, exact: bool) -> None:
    model, optimizer, average = made()
    ddp = DistributedDataParallel(model)
    parallel = graphopt.ZeRO(stage=stage)
    step, call, ours = compiled(read, reached, parallel=parallel, pipeline=pipeline)
    generator = torch.Generator().manual_seed(100 + rank)
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0} if exact else {}
    for _ in range(3):
        x = torch.randn(4, 64, generator=generator)
        wanted = read(ddp, model, optimizer, average, x)
        torch.testing.assert_close(call(x), wanted, **tolerance)
    step.flush()
    with step.full_parameters():
        for mine, theirs in zip(ours, (model, average), strict=True):
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(one, other)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", [(1, "none"), (1, "default"), (3, "none")], ids=str)
@pytest.mark.parametrize("reached", ["arguments", "model an argument", "closure"])
@pytest.mark.parametrize("read", READS)
def test_as_ddp(read: str, reached: str, how: tuple[int, str], two_ranks: Pool) -> None:
    two_ranks.run(train, READS[read], reached, *how, True)


@pytest.mark.parametrize("read", READS)
def test_stage_three_from_a_closure(read: str, two_ranks: Pool) -> None:
    two_ranks.run(train, READS[read], "closure", 3, "default", True)


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_up_to_the_order_of_their_sums(stage: int, two_ranks: Pool) -> None:
    two_ranks.run(train, norms, "closure", stage, "default", False)


def gathers(rank: int, read: Run) -> int:
    parallel = graphopt.ZeRO(stage=3)
    step, call, _ = compiled(read, "closure", parallel=parallel, pipeline="none")
    call(torch.randn(4, 64))
    nodes = filter(is_collective, step.graph_module.graph.nodes)
    return sum("all_gather" in str(node.target) for node in nodes)


@pytest.mark.parametrize("read", [averaged, averaged_in_lists, clipped])
def test_averages_are_computed_in_rows(read: Run, two_ranks: Pool) -> None:
    """They take no gather besides those of the forward and the backward."""
    assert two_ranks.run(gathers, read) == two_ranks.run(gathers, nothing)
