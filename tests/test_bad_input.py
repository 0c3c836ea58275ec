"""What a step may not do: refused with its line and the way out, and nothing is changed.

Each step marks the line that its error has to name with `# HERE`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from refusal import CASE, fresh, refused
from zoo import train_step


def branches_on_the_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    if max([loss], key=float) > 0:  # HERE
        loss.backward()
        optimizer.step()
    return loss


def converts_to_float(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    return max([train_step(model, optimizer, x, y)], key=float)  # HERE


VALUES = [(branches_on_the_loss, "torch.where"), (converts_to_float, "return")]


@pytest.mark.parametrize(("step", "word"), VALUES, ids=lambda v: getattr(v, "__name__", ""))
def test_values_of_tensors_in_python(step: Callable[..., Any], word: str) -> None:
    assert word in str(refused(step, fresh(step)))


# What a step reads or changes outside its arguments

calls = 0
history: list[Tensor] = []
kept: set[Tensor] = set()


def counts_in_an_attribute(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    model.calls += 1
    loss = F.cross_entropy(model(x), y) * model.calls
    loss.backward()
    optimizer.step()
    return loss


def counts_in_a_global(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    global calls
    calls += 1
    loss = F.cross_entropy(model(x), y) * calls
    loss.backward()
    optimizer.step()
    return loss


def draws_from_random(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = next(iter(random.random, 2))  # HERE
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()
    optimizer.step()
    return loss


def draws_from_numpy(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = max([1], key=numpy.random.rand)  # HERE
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()
    optimizer.step()
    return loss


def branches_at_random(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    if next(iter(random.random, 2)) < 2:  # HERE
        return train_step(model, optimizer, x, y)
    return x


def seeds_the_generator(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)  # HERE
    return train_step(model, optimizer, x, y)


def appends_to_a_global(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, y)
    history.append(loss.detach())
    return loss


def adds_to_a_global(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, y)
    kept.add(loss.detach())
    return loss


OUTSIDE = [
    (draws_from_random, "random"),
    (draws_from_numpy, "random"),
    (branches_at_random, "random"),
    (seeds_the_generator, "seed"),
]


@pytest.mark.parametrize(("step", "word"), OUTSIDE, ids=lambda v: getattr(v, "__name__", ""))
def test_state_outside_the_arguments(step: Callable[..., Any], word: str) -> None:
    w = fresh(step)
    assert word in str(refused(step, w))


def test_tensor_kept_by_the_step() -> None:
    """A list to which it appends grows in each call; a set would at capture only. Also one that was
    there when conftest.py called `gc.freeze`."""
    history.clear()
    kept.clear()
    assert gc.get_freeze_count()
    assert "outside the model" in str(refused(adds_to_a_global, fresh()))
    assert not kept
    found = []
    for run in (appends_to_a_global, graphopt.compile(appends_to_a_global)):
        torch.manual_seed(0)
        w = fresh()
        losses = [run(w.model, w.optimizer, *CASE.batch(number)).item() for number in range(3)]
        assert [loss.item() for loss in history] == losses
        assert not any(loss.requires_grad for loss in history)
        found.append(losses)
        history.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize("step", [counts_in_an_attribute, counts_in_a_global])
def test_a_step_that_counts(step: Callable[..., Any]) -> None:
    global calls
    found = []
    compiled = graphopt.compile(step)
    for run in (step, compiled):
        calls, w = 0, fresh(step)
        w.model.calls = 0
        for number in range(3):
            loss = run(w.model, w.optimizer, *CASE.batch(number))
            found.append((loss.item(), calls, w.model.calls))
    assert found[:3] == found[3:]
    assert len(compiled.captures) == 1


def test_closed_over_counter() -> None:
    count = 0

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        loss = F.cross_entropy(model(x), y) / count
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for run in (step, graphopt.compile(step)):
        count, w = 0, fresh(step)
        for number in range(3):
            found.append((run(w.model, w.optimizer, *CASE.batch(number)).item(), count))
    assert found[:3] == found[3:]


def test_learning_rate_changed_inside() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        return train_step(model, optimizer, x, y)

    captured, eager = fresh(step), fresh(step)
    compiled = graphopt.compile(step)
    for i in range(3):
        expected = step(eager.model, eager.optimizer, *CASE.batch(i))
        assert torch.equal(compiled(captured.model, captured.optimizer, *CASE.batch(i)), expected)
        assert captured.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]


def print_shape(module: nn.Module, args: Any, output: Tensor) -> None:
    print("shape", tuple(output.shape))


def print_value(module: nn.Module, args: Any, output: Tensor) -> None:
    print(output.detach().mean())


def print_gradient(gradient: Tensor) -> None:
    print(gradient.norm())


@pytest.mark.parametrize("hook", [print_shape, print_value, print_gradient])
def test_hooks_print_in_each_call(
    hook: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for compiled in (False, True):
        torch.manual_seed(0)
        w = fresh()
        if hook is print_gradient:
            w.model.head.weight.register_hook(hook)
        else:
            w.model.head.register_forward_hook(hook)
        step: Any = graphopt.compile(train_step) if compiled else train_step
        for i in range(3):
            step(w.model, w.optimizer, *CASE.batch(i))
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].count("\n") == 3


def test_writing_a_file(tmp_path: Any) -> None:
    target = tmp_path / "loss.txt"

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        with target.open("a") as file:  # HERE
            file.write("step")
        return loss

    refused(step, fresh(step))
    assert not target.exists()
