"""What a sharded training refuses: on all ranks, in time, and with nothing lost."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional as F

import graphopt
from gloo import Pool
from zero_cases import Beside, Uneven, batches, same, train_step, whole

SECONDS = 60.0


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Other(nn.Module):
    """The names of `Uneven`, in other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(70, 260), nn.Linear(260, 70)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.head(self.tokens(tokens).tanh())
        return x


def trained_other() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Other()
    optimizer = adamw(model.parameters())
    model(torch.zeros(2, 3, dtype=torch.long)).mean().backward()
    optimizer.step()
    return model, optimizer


def load_parameters(pair: Beside, rank: int, folder: str) -> None:
    pair.model.load_state_dict(trained_other()[0].state_dict())


def load_optimizer(pair: Beside, rank: int, folder: str) -> None:
    before = copy.deepcopy(pair.reference_optimizer.state_dict())
    pair.optimizer.load_state_dict(trained_other()[1].state_dict())
    try:
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)))
    finally:
        pair.optimizer.load_state_dict(before)


def read_checkpoint(pair: Beside, rank: int, folder: str) -> None:
    model, optimizer = get_state_dict(*trained_other())
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(pair.model, pair.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


Attempt = Callable[[Beside, int, str], None]
OF_ANOTHER_MODEL: dict[str, Attempt] = {
    "parameters": load_parameters,
    "optimizer": load_optimizer,
    "checkpoint": read_checkpoint,
}


def run_refused(rank: int, stage: int, attempt: str, folder: str) -> str:
    pair = Beside(Uneven, adamw, stage=stage)
    pair.run(rank, 1)
    start = time.monotonic()
    with pytest.raises(
        (Exception, CheckpointException), match=r"shape|[Ss]ize|broadcast"
    ) as caught:
        OF_ANOTHER_MODEL[attempt](pair, rank, folder)
    assert time.monotonic() - start < SECONDS
    pair.compare()
    pair.run(rank, 2)
    pair.compare()
    return type(caught.value).__name__


@pytest.mark.parametrize("attempt", OF_ANOTHER_MODEL)
@pytest.mark.parametrize("stage", [1, 3])
def test_state_of_another_model(two_ranks: Pool, tmp_path: Path, stage: int, attempt: str) -> None:
    """What torch loads, torch refuses; a state that it takes is refused by the next call."""
    said = {"parameters": "RuntimeError", "optimizer": "CaptureError"}
    wanted = said.get(attempt, "CheckpointException")
    assert two_ranks.run(run_refused, stage, attempt, str(tmp_path)) == [wanted] * 2


def by_closure(model: nn.Module, optimizer: Any, tokens: Tensor, wanted: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
        loss.backward()
        return loss

    found: Tensor = optimizer.step(closure).detach()
    return found


class Odd(torch.optim.Optimizer):
    """Keeps the sorted elements of a gradient, a list and a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(sorted=torch.zeros(parameter.numel()), names=["a"])
                values = parameter.grad.flatten().sort().values
                state["sorted"].mul_(0.5).add_(values)
                update = state["sorted"].flip(0).view_as(parameter)
                parameter.sub_(update, alpha=group["lr"])


def run_odd(rank: int, stage: int) -> None:
    pair = Beside(Uneven, Odd, stage=stage, pipeline="default")
    pair.run(rank)
    pair.compare()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_is_no_work_on_rows_gets_wholes(two_ranks: Pool, stage: int) -> None:
    two_ranks.run(run_odd, stage)


def run_unshardable(rank: int, stage: int) -> str:
    torch.manual_seed(3)
    model = Uneven()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.LBFGS(model.parameters())
    step = graphopt.compile(by_closure, parallel=graphopt.ZeRO(stage=stage))
    start = time.monotonic()
    with pytest.raises(graphopt.CaptureError) as caught:
        step(model, optimizer, *next(batches(rank, 1)))
    assert time.monotonic() - start < SECONDS
    for value, parameter in zip(before, model.parameters(), strict=True):
        same(whole(parameter.detach()), value, "a parameter")
    other = adamw(model.parameters())
    again = graphopt.compile(train_step, parallel=graphopt.ZeRO(stage=stage))
    again(model, other, *next(batches(rank, 1)))
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_cannot_be_sharded(two_ranks: Pool, stage: int) -> None:
    for said in two_ranks.run(run_unshardable, stage):
        assert "LBFGS.step() takes the values of tensors" in said and "hint" in said
