"""Settings of parameter groups that a step sets before, between and behind its schedulers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import graphopt

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")

CALLS = 6

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
}


class Trained:
    def __init__(self, schedule: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        groups = [
            {"params": self.model[0].parameters()},
            {"params": self.model[2].parameters(), "lr": 0.05},
        ]
        self.optimizer = torch.optim.AdamW(groups, 0.1)
        self.scheduler = SCHEDULERS[schedule](self.optimizer)
        self.initial = [group["lr"] for group in self.optimizer.param_groups]
        self.log: list[float] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def left(self) -> list[Any]:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        last = self.scheduler.last_epoch, self.scheduler.get_last_lr()
        return [[p.tolist() for p in self.model.parameters()], settings, last, str(self.log)]


def warms_up_behind(t: Trained, x: Tensor, number: int) -> Any:
    t.scheduler.step()
    if number < 3:
        for group, rate in zip(t.groups, t.initial, strict=True):
            group["lr"] = rate / 3 * number
    return t.train(x)


def warms_up_before(t: Trained, x: Tensor, number: int) -> Any:
    if number < 3:
        for group in t.groups:
            group["lr"] = group["initial_lr"] * number / 3
    loss = t.train(x)
    t.scheduler.step()
    return loss


def keeps_above(t: Trained, x: Tensor, number: int) -> Any:
    loss = t.train(x)
    t.scheduler.step()
    for group in t.groups:
        group["lr"] = max(group["lr"], 0.06)
    return loss, t.groups[0]["lr"]


def halves_between(t: Trained, x: Tensor, number: int) -> Any:
    t.scheduler.step()
    first = t.train(x)
    t.groups[1]["lr"] *= 0.5
    t.log.append(t.groups[1]["lr"])
    t.scheduler.step()
    return first, t.train(x), t.scheduler.get_last_lr()


def sets_last(t: Trained, x: Tensor, number: int) -> Any:
    loss = t.train(x)
    t.scheduler.step()
    t.groups[0]["lr"] = 0.01 * number
    return loss


def decides_by_it(t: Trained, x: Tensor, number: int) -> Any:
    t.scheduler.step()
    t.groups[0]["lr"] *= 0.5
    return t.train(x) if t.groups[0]["lr"] > 0.03 else t.train(-x)


def sets_another_setting(t: Trained, x: Tensor, number: int) -> Any:
    t.scheduler.step()
    t.groups[0]["weight_decay"] = 0.01 * (number % 2)
    return t.train(x)


STEPS = [
    warms_up_behind,
    warms_up_before,
    keeps_above,
    halves_between,
    sets_last,
    decides_by_it,
    sets_another_setting,
]


def _left(schedule: str, step: Callable[..., Any], compiled: bool) -> list[Any]:
    trained = Trained(schedule)
    run = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(CALLS):
        result = run(trained, torch.rand(5, 3, generator=generator), number)
        found.append([str(result), trained.left()])
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "schedule",
    [
        "step",
        "one cycle",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("lambda", "cosine", "cyclic")),
    ],
)
def test_what_a_step_sets_is_set_where_it_sets_it(schedule: str, step: Callable[..., Any]) -> None:
    assert _left(schedule, step, True) == _left(schedule, step, False)


def _actions(t: Trained, x: Tensor, number: int) -> list[Callable[[], Any]]:
    def scales() -> None:
        for group in t.groups:
            group["lr"] *= 0.5

    def sets() -> None:
        t.groups[0]["lr"] = 0.03

    def by_argument() -> None:
        t.groups[1]["lr"] = t.initial[1] * (number + 1) / 8

    def bounds() -> None:
        t.groups[0]["lr"] = max(t.groups[0]["lr"], 0.01)

    def shows() -> Any:
        return t.groups[0]["lr"]

    def keeps() -> None:
        t.log.append(t.groups[1]["lr"])

    def asks() -> Any:
        return x.sum() if t.groups[0]["lr"] > 0.02 else None

    steps = [t.scheduler.step, t.scheduler.step, lambda: t.train(x), lambda: t.train(x)]
    return [scales, sets, by_argument, bounds, shows, keeps, asks, t.scheduler.get_last_lr, *steps]


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(each, marks=pytest.mark.full) for each in range(5, 20))]
)
def test_programs_of_sets_and_steps(seed: int) -> None:
    chosen = random.Random(seed)
    order = [chosen.randrange(12) for _ in range(6)]
    schedule = chosen.choice(list(SCHEDULERS))

    def step(t: Trained, x: Tensor, number: int) -> Any:
        actions = _actions(t, x, number)
        return [actions[each]() for each in order]

    assert _left(schedule, step, True) == _left(schedule, step, False)


def test_what_only_the_graph_knows_is_refused_behind_a_scheduler() -> None:
    def step(t: Trained, x: Tensor) -> Any:
        loss = t.train(x)
        t.scheduler.step()
        t.groups[0]["lr"] = loss.item()

    trained = Trained("step")
    before = trained.left()
    with pytest.raises(graphopt.CaptureError, match=r"sets 'lr' .* behind the step of a StepLR"):
        graphopt.compile(step)(trained, torch.ones(4, 3))
    assert trained.left() == before
