"""Loops as people publish them, against eager: schedules in arrays, adversarial training with
backups, optimizers with buffers of decisions, what schedulers say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

CALLS = 7


class Loop(NamedTuple):
    """A loop that is not captured yet.

    Attributes:
        step: of the number of a call and a batch.
        left: what the program finds after a call.
        calls: how many there are.
        captures: how many graphs these need.
    """

    step: Callable[..., Any]
    left: Callable[[], Any]
    calls: int = CALLS
    captures: int = 1


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def an_array_that_changes_between_calls() -> Loop:
    model, scales = network(), numpy.ones(CALLS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) * scales[number]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def left() -> Any:
        scales[:] *= 1.5
        return list(model.parameters())

    return Loop(step, left, captures=CALLS)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(3, 6), nn.Linear(6, 3)

    def forward(self, y: Tensor) -> Any:
        return self.out(torch.tanh(self.emb(y)))


class Adversary:
    """Moves embeddings along their gradients, and puts them back."""

    def __init__(self, model: nn.Module, anew: bool) -> None:
        self.model, self.anew = model, anew
        self.backup: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def attack(self, first: bool = True) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and "emb" in name:
                if first:
                    self.backup[name] = parameter.data.clone()
                norm = torch.norm(parameter.grad)
                if norm != 0 and not torch.isnan(norm):
                    parameter.data.add_(0.3 * parameter.grad / norm)
                    parameter.data = self.project(name, parameter.data)

    def project(self, name: str, data: Tensor) -> Tensor:
        moved = data - self.backup[name]
        if torch.norm(moved) > 1.0:
            moved = moved / torch.norm(moved)
        return self.backup[name] + moved

    def restore(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "emb" in name:
                assert name in self.backup
                parameter.data = self.backup[name]
        if self.anew:
            self.backup = {}
        else:
            self.backup.clear()

    def keep_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad.clone()

    def restore_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.gradients[name]


def fgm() -> Loop:
    model = Embedded()
    optimizer, adversary = (
        torch.optim.Adam(model.parameters(), lr=0.01),
        Adversary(model, anew=False),
    )

    def step(number: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(y), y)
        loss.backward()
        adversary.attack()
        F.cross_entropy(model(y), y).backward()
        adversary.restore()
        optimizer.step()
        model.zero_grad()
        return loss

    return Loop(step, lambda: [*model.parameters(), len(adversary.backup)])


def pgd(anew: bool = False) -> Loop:
    model = Embedded()
    optimizer, adversary = torch.optim.Adam(model.parameters(), lr=0.01), Adversary(model, anew)

    def step(number: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(y), y)
        loss.backward()
        adversary.keep_gradients()
        for round_number in range(3):
            adversary.attack(first=round_number == 0)
            if round_number < 2:
                model.zero_grad()
            else:
                adversary.restore_gradients()
            F.cross_entropy(model(y), y).backward()
        adversary.restore()
        optimizer.step()
        model.zero_grad()
        return loss

    return Loop(step, lambda: [*model.parameters(), len(adversary.backup)])


class Rectified(torch.optim.Optimizer):
    """RAdam as its authors have published it."""

    def __init__(self, params: Any, in_group: bool) -> None:
        super().__init__(params, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8})
        self.in_group = in_group
        self.buffer: Any = [[None, None, None] for _ in range(10)]
        if in_group:
            for group in self.param_groups:
                group["buffer"] = self.buffer

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["v"].mul_(beta2).addcmul_(p.grad.data, p.grad.data, value=1 - beta2)
                state["m"].mul_(beta1).add_(p.grad.data, alpha=1 - beta1)
                state["step"] += 1
                buffer = group["buffer"] if self.in_group else self.buffer
                known = buffer[int(state["step"] % 10)]
                if state["step"] == known[0]:
                    length, size = known[1], known[2]
                else:
                    known[0] = state["step"]
                    decay = beta2 ** state["step"]
                    longest = 2 / (1 - beta2) - 1
                    length = longest - 2 * state["step"] * decay / (1 - decay)
                    known[1] = length
                    size = group["lr"] / (1 - beta1 ** state["step"])
                    if length >= 5:
                        part = (length - 4) / (longest - 4) * (length - 2) / length
                        size *= math.sqrt((1 - decay) * part * longest / (longest - 2))
                    known[2] = size
                if length >= 5:
                    p.data.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-size)
                else:
                    p.data.add_(state["m"], alpha=-size)


def rectified(in_group: bool) -> Loop:
    model = network()
    optimizer = Rectified(model.parameters(), in_group)

    def step(number: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    left = lambda: [*model.parameters(), *(v for row in optimizer.buffer for v in row)]  # noqa: E731
    return Loop(step, left, calls=26, captures=3)


class Counts(NamedTuple):
    done: int
    average: float


def replaced_tuple() -> Loop:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Trainer:
        def __init__(self) -> None:
            self.counts, self.pair = Counts(0, 0.5), (1.0, (2, 3))

        def step(self, number: int, x: Tensor, y: Tensor) -> Any:
            loss = F.cross_entropy(model(x), y) * self.counts.average
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done, average = self.counts.done + 1, 0.9 * self.counts.average
            self.counts = self.counts._replace(done=done, average=average)
            self.pair = (self.pair[0] / 2, (self.pair[1][0] + 1, 3))
            return loss * self.pair[0]

    trainer = Trainer()
    left = lambda: [*model.parameters(), trainer.counts, trainer.pair]  # noqa: E731
    return Loop(trainer.step, left)


def cumulative_average() -> Loop:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, lambda: [*model.state_dict().values()])


LOOPS: dict[str, Callable[[], Loop]] = {
    "an array that changes": an_array_that_changes_between_calls,
    "FGM": fgm,
    "PGD": pgd,
    "a tuple that is replaced": replaced_tuple,
    "cumulative averages": cumulative_average,
}


def trained(make: Callable[[], Loop], compiled: bool) -> tuple[list[Any], int, int]:
    torch.manual_seed(0)
    loop = make()
    step: Any = graphopt.compile(loop.step) if compiled else loop.step
    found: list[Any] = []
    for number in range(loop.calls):
        returned = step(number, torch.randn(5, 4), torch.randint(0, 3, (5,)))
        found += returned if isinstance(returned, tuple) else [returned]
        found += [v.detach().clone() if isinstance(v, Tensor) else v for v in loop.left()]
    return found, step._calls.captured if compiled else 0, loop.captures


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_those_of_eager(name: str) -> None:
    expected, _, captures = trained(LOOPS[name], compiled=False)
    found, made, _ = trained(LOOPS[name], compiled=True)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other
    assert made <= captures + 1  # the first call of an optimizer may be a graph of its own


AS_PUBLISHED = {
    "PGD": (
        lambda: pgd(anew=True),
        r"reads adversary\.backup outside its arguments and changes it",
    ),
    "RAdam": (lambda: rectified(in_group=False), r"needs a graph for each value of optimizer"),
    "RAdam, kept in a group": (
        lambda: rectified(in_group=True),
        r"needs a graph for each value of optimizer",
    ),
}


@pytest.mark.parametrize(("make", "reason"), AS_PUBLISHED.values(), ids=list(AS_PUBLISHED))
def test_loops_that_are_refused_as_published(make: Callable[[], Loop], reason: str) -> None:
    with pytest.raises(graphopt.CaptureError, match=reason):
        trained(make, compiled=True)
