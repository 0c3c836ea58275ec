"""Functions that others stand for: wrappers that torch.compile makes, patches of torch's tracer."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from test_decisions import assert_alike, left_by

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, foreach=True),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, foreach=False),
}


def halve(x: Tensor) -> Tensor:
    return x / 2


class Scales:
    def scale(self, x: Tensor) -> Tensor:
        return x * 3


SCALES = Scales()
HERE = sys.modules[__name__]


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = F.mse_loss(SCALES.scale(halve(model(x))), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(kind: str, change: Callable[[], None], compiled: bool) -> tuple[list[Any], int]:
    """Everything that six calls leave, with a change after three; how many captures."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[kind](model.parameters())
    run = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    captures: dict[int, Any] = {}
    for call in range(6):
        if call == 3:
            change()
        found += [run(model, optimizer, torch.randn(3, 4)), *left_by(model, optimizer)]
        captures.update((id(each), each) for each in getattr(run, "captures", ()))
    return found, len(captures)


def hidden(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    function = torch.compiler.disable(getattr(owner, name))
    monkeypatch.setattr(owner, name, function)


def hide_all(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As torch.compile does with the first two of these."""
    used = type(OPTIMIZERS[kind]([nn.Parameter(torch.zeros(1))]))
    module = sys.modules[used.__module__]
    parts = ("_fused_", "_multi_", "_single_")
    names = [n for n, v in vars(module).items() if n.startswith(parts) and callable(v)]
    places = [*((module, name) for name in names), (used, "_init_group"), (Optimizer, "zero_grad")]
    for owner, name in [*places, (HERE, "halve"), (Scales, "scale"), (F, "mse_loss")]:
        hidden(monkeypatch, owner, name)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_wrapper_is_no_change(kind: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> None:
        for _ in range(times):
            hide_all(monkeypatch, kind)

    expected, _ = trained(kind, lambda: None, compiled=False)
    for _ in range(2):  # captured without them, then with them
        found, captures = trained(kind, change, compiled=True)
        assert_alike(found, expected)
        assert captures == 1


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """Looks like a wrapper by its attributes, and does something else."""

    @functools.wraps(torch.compiler.disable(function))
    def doubled(*args: Any) -> Any:
        return function(*args) * 2

    return doubled


@pytest.mark.parametrize(
    ("owner", "name", "original"), [(HERE, "halve", halve), (Scales, "scale", Scales.scale)]
)
@pytest.mark.parametrize("change", [twice, lambda f: torch.compiler.disable(twice(f))])
def test_another_function_is_one(
    owner: Any, name: str, original: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        monkeypatch.setattr(owner, name, torch.compiler.disable(original))
        monkeypatch.setattr(owner, name, change(original))

    expected, _ = trained("sgd", replace, compiled=False)
    monkeypatch.undo()
    found, captures = trained("sgd", replace, compiled=True)
    assert_alike(found, expected)
    assert captures == 2


class Checkpointed(nn.Linear):
    """A layer that is called by its base class, as those of transformers are."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class CalledByName(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return nn.Module.__call__(self, *args)


class FoundByName(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, nn.Module.__getattr__(self, "weight"), self.bias)


class CallKept(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        call = nn.Module.__call__
        return super().forward(call(nn.Identity(), input))


@pytest.mark.parametrize("layer", [Checkpointed, CalledByName, FoundByName, CallKept])
def test_what_stands_for_a_function_while_a_step_is_traced(layer: type[nn.Linear]) -> None:
    """It is gone some time after the capture, and nobody's change."""
    model = nn.Sequential(layer(4, 4), layer(4, 4))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = graphopt.compile(step)
    made: dict[int, Any] = {}
    for _ in range(4):
        run(model, optimizer, torch.randn(3, 4))
        made.update((id(each), each) for each in run.captures)
        gc.collect()
    assert len(made) == 1
