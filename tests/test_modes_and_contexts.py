"""Modes of modules that a step sets, and contexts that it enters beside decisions by value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphopt

Step = Callable[..., Any]


def _world() -> SimpleNamespace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return SimpleNamespace(model=model, optimizer=optimizer, seen=[], scale=1.0)


def _trained(w: SimpleNamespace, x: torch.Tensor, scale: float = 1.0) -> float:
    w.optimizer.zero_grad()
    loss = (w.model(x) * scale).pow(2).mean()
    loss.backward()
    w.optimizer.step()
    return loss.item()


def _train(w: SimpleNamespace, x: torch.Tensor) -> float:
    w.model.train()
    return _trained(w, x)


def _train_all_but_norms(w: SimpleNamespace, x: torch.Tensor) -> float:
    w.model.train()
    w.model[1].eval()
    return _trained(w, x)


def _leave_in_eval(w: SimpleNamespace, x: torch.Tensor) -> float:
    w.model.train()
    loss = _trained(w, x)
    w.model.eval()
    return loss


def _scale_by_mode(w: SimpleNamespace, x: torch.Tensor) -> float:
    scale = 1.0 if w.model.training else w.scale
    w.model.train()
    return _trained(w, x, scale)


def _show_mode(w: SimpleNamespace, x: torch.Tensor) -> float:
    graphopt.callback(lambda: w.seen.append(("before", w.model.training)))
    w.model.train()
    graphopt.callback(lambda: w.seen.append(("then", w.model.training)))
    return _trained(w, x)


def _evaluate(w: SimpleNamespace, index: int) -> None:
    w.model.eval()


def _evaluate_a_part(w: SimpleNamespace, index: int) -> None:
    w.model[index % 3].eval()


def _evaluate_and_scale(w: SimpleNamespace, index: int) -> None:
    w.model.eval()
    w.scale = [1.0, 1.0, 1.0, 2.0, 1.0, 3.0][index]


def _runs(step: Step, between: Callable[[SimpleNamespace, int], None], compiled: bool) -> Any:
    w = _world()
    called = graphopt.compile(lambda x: step(w, x)) if compiled else lambda x: step(w, x)
    said: list[Any] = []
    for index in range(6):
        torch.manual_seed(index)
        loss = called(torch.randn(5, 3))
        modes = [module.training for module in w.model.modules()]
        said.append((loss, modes, [t.tolist() for t in w.model.state_dict().values()]))
        between(w, index)
    return said, w.seen, len(called.captures) if isinstance(called, graphopt.TrainStep) else 0


@pytest.mark.parametrize("step", [_train, _train_all_but_norms, _leave_in_eval])
@pytest.mark.parametrize("between", [_evaluate, _evaluate_a_part])
def test_modes_that_a_step_sets(step: Step, between: Any) -> None:
    eager, compiled = _runs(step, between, False), _runs(step, between, True)
    assert eager[0] == compiled[0]
    if between is _evaluate:
        assert compiled[2] <= 2  # the first call is in training, all others begin in evaluation


def test_what_is_read_in_the_former_mode_alone() -> None:
    eager = _runs(_scale_by_mode, _evaluate_and_scale, False)
    assert eager[0] == _runs(_scale_by_mode, _evaluate_and_scale, True)[0]


@pytest.mark.parametrize("between", [_evaluate, _evaluate_a_part])
def test_modes_that_a_callback_sees(between: Any) -> None:
    eager, compiled = _runs(_show_mode, between, False), _runs(_show_mode, between, True)
    assert eager[:2] == compiled[:2]


class Trainer:
    def __init__(self, context: AbstractContextManager[Any]) -> None:
        torch.manual_seed(0)
        self.context = context
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.skipped = 0

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        with self.context:
            target = self.model(x).float()
        loss = (self.model(x) - target.detach()).square().sum() + target.sum()
        if loss.isnan() or not loss.requires_grad:
            self.skipped += 1
            return None
        if target.requires_grad:
            loss.backward()
            self.optimizer.step()
        return loss.item()


def _trained_in_context(
    make: Callable[[], Any], other: Callable[[], Any] | None, compiled: bool
) -> list[Any]:
    trainer = Trainer(make())
    step = graphopt.compile(trainer.step) if compiled else trainer.step
    found: list[Any] = []
    for index in range(6):
        if index == 3 and other is not None:
            trainer.context = other()
        x = torch.full((2, 4), float("nan")) if index in (2, 4) else torch.randn(2, 4)
        result = step(x)
        found += [result, trainer.skipped, trainer.model.weight.tolist()]
        found += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        found += [vars(trainer.context).get("prev")]
    return found


_MADE: list[Callable[[], Any]] = [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    lambda: torch.autocast("cpu", enabled=False),
    lambda: torch.cpu.amp.autocast(),
    torch.no_grad,
    torch.enable_grad,
]


@pytest.mark.parametrize("number", range(len(_MADE)))
@pytest.mark.parametrize("other", [None, nullcontext, lambda: torch.autocast("cpu")])
@pytest.mark.filterwarnings("ignore:.*autocast.*is deprecated:FutureWarning")
def test_they_are_entered_in_each_call(number: int, other: Callable[[], Any] | None) -> None:
    results = [
        repr(_trained_in_context(_MADE[number], other, compiled)) for compiled in (False, True)
    ]
    assert results[0] == results[1]
