"""A scheduler that is stepped before the optimizer: the update uses the rates that it has set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

import graphopt
from gloo import Pool

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, 0.1, weight_decay=0.02),
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "fused": lambda p: optim.AdamW(p, 0.1, fused=True),
    "foreach": lambda p: optim.Adam(p, 0.1, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, 0.1),
    "groups": lambda p: optim.SGD([{"params": [each], "lr": 0.1 / (n + 1)} for n, each in
                                   enumerate(p)], 0.1, momentum=0.9),
}  # fmt: skip


def chained(optimizer: Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: n / 3 if n < 3 else 1 - n / 20),
    "numpy": lambda o: lr_scheduler.LambdaLR(o, lambda n: numpy.cos(n / 10)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "sequential": chained,
}


class Trained:
    """A model with what trains it."""

    def __init__(self, optimizer: str, scheduler: Callable[[Optimizer], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = scheduler(self.optimizer)
        self.log: list[Any] = []
        self.count = 0

    def backward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def step(self, x: Tensor) -> Any:
        loss = self.backward(x)
        self.scheduler.step()
        self.optimizer.step()
        return loss

    def left(self) -> list[Any]:
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        return [[p.tolist() for p in self.model.parameters()], str(settings), str(self.log)]


def both(
    make: Callable[[], Trained], step: Callable[[Trained, Tensor], Any], data: int = 0
) -> tuple[list[list[Any]], int]:
    """What each call leaves, eagerly and captured, and the number of graphs."""
    found: list[list[Any]] = []
    graphs = 0
    for compiled in (False, True):
        trained, rows = make(), []
        run: Any = graphopt.compile(step) if compiled else step
        generator = torch.Generator().manual_seed(data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                returned = run(trained, torch.randn(4, 3, generator=generator))
                rows.append([_plain(returned), *trained.left()])
        rows.append([str(each.message) for each in caught])
        found.append(rows)
        graphs = len(run.captures) if compiled else 0
    return found, graphs


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    return value.tolist() if isinstance(value, Tensor) else repr(value)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_update_uses_what_the_scheduler_has_set(optimizer: str, scheduler: str) -> None:
    if (optimizer, scheduler) == ("adagrad", "one cycle"):
        pytest.skip("it has no momentum to cycle")
    found, graphs = both(lambda: Trained(optimizer, SCHEDULERS[scheduler]), Trained.step)
    assert found[0] == found[1]  # the warning about the order included
    begins_with_another = optimizer in ("sgd", "groups") or scheduler == "one cycle"
    assert graphs <= (2 if begins_with_another else 1)


def twice(trained: Trained, x: Tensor) -> Any:
    """As two batches of an epoch that is one step."""
    rows = []
    for _ in range(2):
        rows.append((trained.step(x).item(), trained.scheduler.get_last_lr()[0]))
        trained.log.append(f"{trained.optimizer.param_groups[0]['lr'] * 2:.5f}")
    return rows


def scaled(trained: Trained, x: Tensor) -> Any:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = trained.backward(x)
    trained.scheduler.step()
    scaler.step(trained.optimizer)
    return loss


def decides_before(trained: Trained, x: Tensor) -> Any:
    loss = trained.backward(x)
    if loss > 0.3:
        return loss
    trained.scheduler.step()
    trained.optimizer.step()
    return loss


def decides_behind_by_other_values(trained: Trained, x: Tensor) -> Any:
    loss = trained.step(x)
    if loss > 0.3:
        trained.log.append("large")
    return loss


def twice_for_one_rate(trained: Trained, x: Tensor) -> Any:
    loss = trained.step(x)
    trained.backward(x)
    trained.optimizer.step()
    return loss


def shows_get_lr(trained: Trained, x: Tensor) -> Any:
    """Which calls the program's function."""
    loss = trained.step(x)
    trained.log.append(trained.scheduler.get_lr()[0])
    trained.scheduler.step()
    return loss, trained.scheduler.get_lr()


@pytest.mark.parametrize(
    "step",
    [twice, scaled, decides_before, decides_behind_by_other_values, twice_for_one_rate,
     shows_get_lr],
)  # fmt: skip
def test_other_steps(step: Callable[..., Any]) -> None:
    found, _ = both(lambda: Trained("adamw", SCHEDULERS["lambda"]), step)
    assert found[0] == found[1]


def test_a_function_of_the_scheduler_finds_what_the_step_has_left() -> None:
    class Counting(Trained):
        def __init__(self) -> None:
            self.count = 0
            super().__init__(
                "sgd", lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + self.count))
            )

        def counts(self, x: Tensor) -> Any:
            self.count += 1
            loss = self.step(x)
            self.count += 1
            self.log.append(self.scheduler.get_lr()[0])
            return loss

    found, _ = both(Counting, Counting.counts)  # type: ignore[arg-type]
    assert found[0] == found[1]


def test_an_optimizer_of_the_programs() -> None:
    class Sign(Optimizer):
        def __init__(self, parameters: Iterator[Any]) -> None:
            super().__init__(parameters, {"lr": 0.1, "scale": 0.5})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.sub_(each.grad.sign() * group["lr"] * group["scale"])
                    each.add_(math.sqrt(group["lr"]) * 1e-3)

    OPTIMIZERS["sign"] = lambda parameters: Sign(parameters)
    try:
        found, graphs = both(lambda: Trained("sign", SCHEDULERS["lambda"]), Trained.step)
    finally:
        del OPTIMIZERS["sign"]
    assert (found[0], graphs) == (found[1], 1)


def decides_by_updated(trained: Trained, x: Tensor) -> Any:
    trained.step(x)
    return 1 if trained.model(x).sum() > 0 else 0


def epoch(trained: Trained, x: Tensor) -> Any:
    """Keeps the best of what is decided by the parameters that the rates of now have made."""
    for part in x[:3]:
        trained.optimizer.zero_grad()
        trained.model(part).square().mean().backward()
        trained.optimizer.step()
        trained.scheduler.step()
    loss = trained.model(x).square().mean().item()
    if not trained.log or loss < trained.log[-1]:
        trained.log.append(loss)


def decides_by_rate(trained: Trained, x: Tensor) -> Any:
    trained.backward(x)
    trained.optimizer.step()
    trained.scheduler.step()
    rate = trained.optimizer.param_groups[0]["lr"]
    if rate < 0.02 or abs(rate) * 10 > 0.9:
        trained.log.append(rate)
    return 1 if trained.scheduler.get_last_lr()[0] > 0.03 else 0


@pytest.mark.parametrize("step", [decides_by_updated, epoch, decides_by_rate])
@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name != "numpy"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_deciding_by_what_the_rates_have_made(
    optimizer: str, scheduler: str, step: Callable[..., Any]
) -> None:
    found, _ = both(lambda: Trained(optimizer, SCHEDULERS[scheduler]), step)
    assert found[0] == found[1]


class Explicit(lr_scheduler.LRScheduler):
    """Is given the epoch, as those of some trainers are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.start = 0.1
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.start * (1 - (epoch or 0) / 20) ** 0.9


def given_the_epoch(trained: Trained, x: Tensor) -> Any:
    trained.scheduler.step(len(trained.log))
    trained.backward(x)
    trained.optimizer.step()
    loss = trained.model(x).square().mean().item()
    trained.log.append(loss)
    return loss < 0.5


def given_a_count(trained: Trained, x: Tensor) -> Any:
    trained.count += 1
    trained.scheduler.step(trained.count)
    trained.backward(x)
    trained.optimizer.step()
    return 1 if trained.model(x).square().mean() < 0.5 else 0


@pytest.mark.parametrize("step", [given_the_epoch, given_a_count])
def test_a_scheduler_that_is_given_the_epoch(step: Callable[..., Any]) -> None:
    found, _ = both(lambda: Trained("sgd", Explicit), step)
    assert found[0] == found[1]


class ByScale(Trained):
    """Its scheduler goes by what the step changes."""

    def __init__(self) -> None:
        self.scale = [1.0]
        super().__init__("sgd", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: self.scale[0]))

    def halve(self) -> None:
        self.scale[0] /= 2

    def halved(self, x: Tensor) -> Any:
        self.halve()
        return self.step(x)

    def called_back(self, x: Tensor) -> Any:
        graphopt.callback(self.halve)
        return self.step(x)


def test_a_scheduler_that_goes_by_what_the_step_changes() -> None:
    found, _ = both(ByScale, ByScale.halved)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_goes_by_what_nobody_sees_is_an_error() -> None:
    with pytest.raises(graphopt.GraphOptError, match="goes by what the step changes"):
        graphopt.compile(ByScale.called_back)(ByScale(), torch.ones(4, 3))


class ChangesEps(lr_scheduler.LRScheduler):
    """Changes a setting that is none of a scheduler's."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["eps"] = 1e-8 * (1 + self.last_epoch)
        return list(self.base_lrs)


class ToZero(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.02 if self.last_epoch < 1 else 0.0
        return list(self.base_lrs)


def test_a_weight_decay_that_becomes_zero() -> None:
    found, graphs = both(lambda: Trained("adamw", ToZero), Trained.step)
    assert (found[0], graphs) == (found[1], 1)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_other_settings_are_an_error_when_they_change() -> None:
    trained = Trained("adamw", ChangesEps)
    with pytest.raises(graphopt.GraphOptError, match="of a parameter group"):
        graphopt.compile(Trained.step)(trained, torch.ones(4, 3))


def _on_rank(rank: int) -> Any:
    return both(lambda: Trained("adamw", SCHEDULERS["lambda"]), Trained.step, data=rank)[0][1]


def test_on_ranks(two_ranks: Pool) -> None:
    """Both ranks have the rates of eager code, and the same parameters."""
    one, other = two_ranks.run(_on_rank)
    alone = both(lambda: Trained("adamw", SCHEDULERS["lambda"]), Trained.step)[0][0]
    assert [row[1] for row in one[:-1]] == [row[1] for row in other[:-1]]
    assert [row[2] for row in one[:-1]] == [row[2] for row in alone[:-1]]
