"""ZeRO on three real ranks: the values of ranks in one process, and more ranks than rows."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt.parallel.sharding import shards_of
from zero_cases import Uneven, batches, same, sharded, train_step, whole

Built = dict[str, Any]
MODELS: Built = {"uneven": Uneven}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def run_sharded(rank: int, model: str, stage: int, pipeline: str, count: int = 3) -> list[Tensor]:
    torch.manual_seed(3)
    made = MODELS[model]()
    optimizer = adamw(made.parameters())
    step = graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=stage), pipeline=pipeline)
    for given in batches(rank, count):
        step(made, optimizer, *given)
    step.flush()
    return [whole(parameter.detach()).clone() for parameter in made.parameters()]


def in_rank_order(model: str, ranks: int, count: int = 3) -> list[Tensor]:
    """The same training in this process: gradients are added in the order of the ranks."""
    torch.manual_seed(3)
    made = MODELS[model]()
    replicas = [made, *(copy.deepcopy(made) for _ in range(1, ranks))]
    optimizer = adamw(made.parameters())
    given = [list(batches(rank, 3)) for rank in range(ranks)]
    for number in range(count):
        for replica, own in zip(replicas, given, strict=True):
            replica.load_state_dict(made.state_dict())
            tokens, wanted = own[number]
            F.cross_entropy(replica(tokens).flatten(0, 1), wanted.flatten()).backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            scaled = [p.grad * (1 / ranks) for p in parameters]  # type: ignore[operator]
            total = scaled[0] + scaled[1]
            for more in scaled[2:]:
                total += more
            parameters[0].grad = total
        optimizer.step()
        for replica in replicas:
            replica.zero_grad()
    return [parameter.detach() for parameter in made.parameters()]


def check(found: list[list[Tensor]], model: str, ranks: int) -> None:
    """All ranks have the same; what is sharded has the bits of sums in rank order."""
    expected = in_rank_order(model, ranks)
    for parameters in found:
        for index, (ours, theirs, first) in enumerate(
            zip(parameters, expected, found[0], strict=True)
        ):
            same(ours, first, f"parameter {index}")
            same(ours, theirs, f"parameter {index}", 1e-6)


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
def test_three_ranks(three_ranks: Pool, stage: int, model: str, pipeline: str) -> None:
    check(three_ranks.run(run_sharded, model, stage, pipeline), model, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_scattered_gradients_have_the_bits_of_the_order_of_ranks(
    three_ranks: Pool, stage: int
) -> None:
    """Of one step, since a ring adds what is not cut in another order."""
    model = "uneven"
    expected = in_rank_order(model, 3, 1)
    cut = [shards_of(parameter, 3) for parameter in MODELS[model]().parameters()]
    assert sum(each is not None for each in cut) == 2
    for found in three_ranks.run(run_sharded, model, stage, "default", 1):
        for shards, ours, theirs in zip(cut, found, expected, strict=True):
            if shards is not None:
                same(ours, theirs, str(shards.shape))


class Few(nn.Module):
    """Fewer rows than ranks: nothing is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16384))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float().mean() * self.weight.square().mean()


def few_step(model: nn.Module, optimizer: Any, tokens: Tensor, wanted: Tensor) -> Tensor:
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run_few(rank: int) -> tuple[bool, float]:
    model = Few()
    optimizer = adamw(model.parameters())
    step = graphopt.compile(few_step, parallel=graphopt.ZeRO(stage=3))
    start = time.monotonic()
    loss = float(step(model, optimizer, *next(batches(0, 1))))
    assert time.monotonic() - start < 60
    return sharded(model.weight), loss


def test_more_ranks_than_rows(three_ranks: Pool) -> None:
    found = three_ranks.run(run_few)
    assert {cut for cut, _ in found} == {False}
    assert len({loss for _, loss in found}) == 1
