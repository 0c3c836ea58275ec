"""Steps that cannot be captured, or must not be, run eagerly: alone and on several ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import graphopt
from gloo import Pool

Step = Any


def by_value(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """A step that decides by a tensor's value."""
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    if max([loss.detach()], key=float) > 1e-4:
        optimizer.step()
    return loss


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def two_backwards(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    for part in (x, x * 2):
        model(part).pow(2).mean().backward()
    loss: Tensor = model(x).sum()
    if max([loss.detach()], key=float) > 1e-4:
        optimizer.step()
    return loss


class Halves(nn.Module):
    """Uses one of two layers; an item decides which, so that ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 3), nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.left if max([x.sum()], key=float) > 0 else self.right
        return self.norm(layer(x))  # type: ignore[no-any-return]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def batch(rank: int, i: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + i))


def trained(step: Step, model: nn.Module, rank: int = 0, steps: int = 4) -> list[Tensor]:
    """Losses, then everything of the model."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [step(model, optimizer, batch(rank, i)).detach() for i in range(steps)]
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return [*losses, *(t.detach().clone() for t in bare.state_dict().values())]


def seeded(make: Any, rank: int = 0) -> nn.Module:
    torch.manual_seed(7 + rank)
    model: nn.Module = make()
    return model


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# In one process


def test_a_refused_step_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    step = graphopt.compile(fallback="eager")(by_value)
    with caplog.at_level(logging.WARNING, "graphopt"):
        mine = trained(step, seeded(net))
    assert same(mine, trained(by_value, seeded(net)))
    (record,) = caplog.records
    assert (
        "by_value runs eagerly" in record.message
        and "max([loss.detach()], key=float)" in record.message
    )
    assert step.captures == () and step.lowered == []
    with pytest.raises(graphopt.GraphOptError, match=r"runs eagerly\n.*value of a tensor"):
        step.graph_module  # noqa: B018


def test_results_have_no_history() -> None:
    step = graphopt.compile(by_value, fallback="eager")
    model = seeded(net)
    loss = step(model, SGD(model.parameters(), lr=0.1), batch(0, 0))
    assert not loss.requires_grad and loss.grad_fn is None


def test_the_default_is_the_error() -> None:
    with pytest.raises(graphopt.CaptureError, match="value of a tensor"):
        trained(graphopt.compile(by_value), seeded(net))


def test_what_can_be_captured_is() -> None:
    step, model = graphopt.compile(plain, fallback="eager"), seeded(net)
    assert same(trained(step, model), trained(plain, seeded(net)))
    assert step.captures


def test_reset_captures_again(caplog: pytest.LogCaptureFixture) -> None:
    step = graphopt.compile(by_value, fallback="eager")
    trained(step, seeded(net))
    step.reset()
    trained(step, seeded(net))
    assert len([r for r in caplog.records if "runs eagerly" in r.message]) == 2


def test_errors_of_the_step_stay_errors() -> None:
    def broken(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(graphopt.compile(broken, fallback="eager"), seeded(net))


def test_after_steps_that_ran_as_a_graph() -> None:
    """Late updates are finished before the first eager call."""

    def by_size(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return plain(model, optimizer, x) if len(x) == 5 else by_value(model, optimizer, x)

    def run(step: Step) -> list[Tensor]:
        model = seeded(net)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = [step(model, optimizer, batch(0, i)[: 5 - i // 2]).detach() for i in range(4)]
        return [*losses, *model.state_dict().values()]

    assert same(run(graphopt.compile(by_size, fallback="eager")), run(by_size))


@pytest.mark.parametrize("value", ["lazy", True, 1])
def test_an_unknown_fallback(value: Any) -> None:
    with pytest.raises(ValueError, match="'eager'"):
        graphopt.compile(plain, fallback=value)


def test_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GRAPHOPT_OFF", "1")
    step = graphopt.compile(plain)
    assert same(trained(step, seeded(net)), trained(plain, seeded(net)))
    assert step.captures == () and "GRAPHOPT_OFF is set" in caplog.text
    with pytest.raises(graphopt.GraphOptError, match="GRAPHOPT_OFF"):
        step.graph_module  # noqa: B018


@pytest.mark.parametrize("value", ["", "0"])
def test_not_turned_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_OFF", value)
    step, model = graphopt.compile(plain), seeded(net)
    trained(step, model, steps=1)
    assert step.captures


def test_turned_off_by_an_unknown_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_OFF", "yes")
    with pytest.raises(graphopt.PipelineSyntaxError, match="GRAPHOPT_OFF='yes'"):
        graphopt.compile(plain)


# On several ranks


def as_ddp(rank: int, make: Any, function: Any) -> list[bool]:
    """Whether a step that falls back gives the bits of eager DDP, from other initial values."""
    step = graphopt.compile(function, fallback="eager")
    mine = trained(step, seeded(make, rank), rank)
    wrapped = DistributedDataParallel(seeded(make, rank), find_unused_parameters=True)
    return [same(mine, trained(function, wrapped, rank)), step.captures == ()]


@pytest.mark.parametrize(("make", "function"), [(net, by_value), (net, two_backwards)])
def test_ranks_average_as_ddp(two_ranks: Pool, make: Any, function: Any) -> None:
    assert two_ranks.run(as_ddp, make, function) == [[True, True]] * 2


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_one_rank_alone_uses(two_ranks: Pool) -> None:
    assert two_ranks.run(as_ddp, Halves, plain) == [[True, True]] * 2


def one_rank_refuses(rank: int) -> tuple[list[Tensor], str]:
    def function(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        return by_value(model, optimizer, x) if rank else plain(model, optimizer, x)

    step = graphopt.compile(function, fallback="eager")
    return trained(step, seeded(net, rank), rank)[4:], step._calls.fallback.reason


def test_all_ranks_fall_back_together(two_ranks: Pool) -> None:
    (left, theirs), (right, own) = two_ranks.run(one_rank_refuses)
    weights = [0, 1, 2, 3, 7, 8]  # running statistics are the rank's own after the last forward
    assert all(torch.equal(left[i], right[i]) for i in weights)
    assert "rank 1 could not capture the step" in theirs and "key=float" in theirs
    assert "the step cannot be captured" in own


def with_average(rank: int, frozen: bool, function: Any) -> list[bool] | str:
    """As `as_ddp`; rank 0 alone keeps an average of the weights, with buffers, and asks it."""
    average = seeded(net).requires_grad_(not frozen) if rank == 0 else None

    def averaged(
        model: nn.Module, optimizer: Optimizer, x: Tensor, average: nn.Module | None
    ) -> Tensor:
        loss: Tensor = function(model, optimizer, x)
        if average is not None:
            with torch.no_grad():
                average(x)
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return loss

    step = graphopt.compile(averaged, fallback="eager")
    try:
        mine = trained(lambda *args: step(*args, average), seeded(net, rank), rank)
    except graphopt.SpmdMismatchError as error:
        return str(error)
    wrapped = DistributedDataParallel(seeded(net, rank))
    return [same(mine, trained(function, wrapped, rank)), step.captures == ()]


def test_a_module_of_one_rank(two_ranks: Pool) -> None:
    assert two_ranks.run(with_average, True, by_value) == [[True, True]] * 2
    for said in two_ranks.run(with_average, False, by_value):
        assert "has to be frozen" in said


def accumulates(rank: int) -> list[bool]:
    def half(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        return loss if max([loss.detach()], key=float) > 0 else -loss

    def run(model: nn.Module, step: Step, no_sync: Any) -> list[Tensor]:
        with no_sync():
            step(model, batch(rank, 0))
        step(model, batch(rank, 1))
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    step = graphopt.compile(half, fallback="eager")
    mine = run(seeded(net), step, step.no_sync)
    wrapped = DistributedDataParallel(seeded(net))
    return [same(mine, run(wrapped, half, wrapped.no_sync))]


def test_no_sync(two_ranks: Pool) -> None:
    assert two_ranks.run(accumulates) == [[True]] * 2


class Trainer:
    """A step that finds the model and the optimizer in `self`, and another model, not trained."""

    def __init__(self, rank: int, wrapped: bool) -> None:
        self.model = model = seeded(net, rank)
        self.teacher = seeded(net, 7 + rank)
        self.optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.parts = [DistributedDataParallel(model) if wrapped else model]

    def step(self, x: Tensor) -> Tensor:
        return by_value(self.parts[0], self.optimizer, x)


def closes_over(rank: int, in_closure: bool) -> list[bool]:
    found = []
    for wrapped in (False, True):
        trainer = Trainer(rank, wrapped)

        def closed_over(x: Tensor, trainer: Trainer = trainer) -> Tensor:
            return trainer.step(x)

        step: Step = closed_over if in_closure else trainer.step
        step = step if wrapped else graphopt.compile(step, fallback="eager")
        losses = [step(batch(rank, i)).detach() for i in range(4)]
        models = (trainer.model.state_dict().values(), trainer.teacher.state_dict().values())
        found.append([*losses, *(t.clone() for model in models for t in model)])
    return [same(*found)]


@pytest.mark.parametrize("in_closure", [False, True])
def test_what_a_step_closes_over_is_averaged(two_ranks: Pool, in_closure: bool) -> None:
    """A model that no optimizer updates stays each rank's own."""
    assert two_ranks.run(closes_over, in_closure) == [[True]] * 2


def refused_eagerly(rank: int, kind: str) -> str:
    model = seeded(net)
    optimizer = SGD(model.parameters(), lr=0.1)
    other = SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    weight = nn.Parameter(torch.ones(4))

    def bare(x: Tensor) -> Tensor:
        loss: Tensor = (weight * x).sum() * max([x.sum()], key=float)
        loss.backward()
        return loss

    def stranger(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        by_value(model, optimizer, x)
        other.step()
        return x

    def in_backward(model: nn.Module, x: Tensor) -> None:
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())  # type: ignore[index]
        try:
            loss = model(x).sum()
            if max([loss.detach()], key=float) > -1e9:  # no graph
                loss.backward()
        finally:
            handle.remove()

    arguments: dict[str, tuple[Any, ...]] = {
        "bare": (bare,),
        "stranger": (stranger, model, optimizer),
        "in backward": (in_backward, model),
    }
    function, *before = arguments[kind]
    try:
        graphopt.compile(function, fallback="eager")(*before, batch(rank, 0))
    except graphopt.GraphOptError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bare", "depends on the value of a tensor"),
        ("stranger", "parameters that are not among the step's arguments"),
        ("in backward", "within the backward"),
    ],
)
def test_what_nobody_would_average_is_refused(two_ranks: Pool, kind: str, message: str) -> None:
    assert all(message in said for said in two_ranks.run(refused_eagerly, kind))


def wrapped_already(rank: int) -> bool:
    def run(step: Step) -> list[Tensor]:
        return trained(step, DistributedDataParallel(seeded(net, rank)), rank)

    return same(run(graphopt.compile(plain, fallback="eager")), run(plain))


def test_a_model_in_ddp_averages_itself(two_ranks: Pool) -> None:
    assert two_ranks.run(wrapped_already) == [True, True]


def turned_off(rank: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHOPT_OFF", "1")
        step = graphopt.compile(plain)
    mine = trained(step, seeded(net, rank), rank)
    return same(mine, trained(plain, DistributedDataParallel(seeded(net, rank)), rank))


def test_turned_off_on_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(turned_off) == [True, True]
