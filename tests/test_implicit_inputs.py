"""Modules, optimizers and tensors that a step uses besides its arguments, against eager."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

STEPS = 4
Loop = Iterator[Any]


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def update(loss: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def closed_over(compiled: Callable[..., Any]) -> Loop:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    @compiled
    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    for _ in range(STEPS):
        yield step(*data())
    yield model.state_dict()


def class_weights(compiled: Callable[..., Any]) -> Loop:
    model, criterion = network(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @compiled
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return update(criterion(model(x), y), optimizer)

    for index in range(STEPS):
        yield step(model, optimizer, *data())
        criterion.weight[index % 3] += 1.0  # read as it is in each call
    yield model.state_dict()


class Schedule:
    def __init__(self) -> None:
        self.scale, self.table = torch.tensor(1.0), {"shift": torch.zeros(3)}


def plain_object(compiled: Callable[..., Any]) -> Loop:
    model, schedule = network(), Schedule()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @compiled
    def step(model: Any, optimizer: Any, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x) * schedule.scale + schedule.table["shift"]
        return update(F.cross_entropy(out, y), optimizer)

    for index in range(STEPS):
        yield step(model, optimizer, schedule, *data())
        if index == 1:
            schedule.scale = torch.tensor(0.5)  # another tensor: captured anew
        schedule.table["shift"].add_(0.1)


def average_written(compiled: Callable[..., Any]) -> Loop:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = [p.detach().clone() for p in model.parameters()]
    mean = torch.zeros(())

    @compiled
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = update(F.cross_entropy(model(x), y), optimizer)
        with torch.no_grad():
            for average, parameter in zip(shadow, model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    for _ in range(STEPS):
        yield step(model, optimizer, *data())
    yield shadow
    yield mean


def averaged_module(compiled: Callable[..., Any]) -> Loop:
    """The copy is never called: its parameters are found by an iterator of torch's."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = copy.deepcopy(model).requires_grad_(False)

    @compiled
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = update(F.cross_entropy(model(x), y), optimizer)
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)
        return loss

    for _ in range(STEPS):
        yield step(model, optimizer, *data())
    yield average.state_dict()


def bare_parameter(compiled: Callable[..., Any]) -> Loop:
    model = network()
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    own = torch.optim.Adam([log_alpha], lr=0.1)

    @compiled
    def step(model: Any, optimizer: Any, own: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        update(loss * log_alpha.exp().detach(), optimizer)
        update((log_alpha.exp() * (loss.detach() - 1.0)).mean(), own)
        return loss

    for _ in range(STEPS):
        yield step(model, optimizer, own, *data())
    yield log_alpha
    yield own.state_dict()["state"]


class Trainer:
    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.weights = torch.tensor([1.0, 2.0, 0.5])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return update(F.cross_entropy(self.model(x), y, weight=self.weights), self.optimizer)


def method(compiled: Callable[..., Any]) -> Loop:
    trainer = Trainer()
    step = compiled(trainer.step)
    for _ in range(STEPS):
        yield step(*data())
    trainer.model = network()  # another model, and the optimizer goes on with the first one's
    yield trainer.model.state_dict()


def two_models(compiled: Callable[..., Any]) -> Loop:
    """The closure's variable stands for another model later."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @compiled
    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    for index in range(STEPS):
        if index == 2:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        yield step(*data())
    yield model.state_dict()


def another_optimizer(compiled: Callable[..., Any]) -> Loop:
    """Over parameters that the step does not use, and one that belongs to no module."""
    model = network()
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    @compiled
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return update(F.cross_entropy(model(x), y), optimizer)

    for _ in range(STEPS):
        yield step(model, optimizer, *data())
    yield [parameter.grad for parameter in model.parameters()]
    yield optimizer.param_groups[0]["params"]


LOOPS = [another_optimizer, closed_over, class_weights, plain_object, average_written,
         averaged_module, bare_parameter, method, two_models]  # fmt: skip
# Gradients that nobody drops are there in the second call.
CAPTURES = {another_optimizer: 2, two_models: 2}


def left(loop: Callable[..., Loop], compiled: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.utils._pytree.tree_leaves(each) for each in loop(compiled)]
    return [tensor.detach().clone() for each in leaves for tensor in each]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_equal_to_eager(loop: Callable[..., Loop]) -> None:
    steps: list[graphopt.TrainStep] = []

    def compiled(step: Callable[..., Any]) -> graphopt.TrainStep:
        steps.append(graphopt.compile(step))
        return steps[0]

    expected = left(loop, lambda step: step)
    got = left(loop, compiled)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))
    assert steps[0]._calls.captured == CAPTURES.get(loop, 1)


def test_neither_model_nor_tensor_is_kept_by_a_step_that_is_gone() -> None:
    trainer = Trainer()
    step = graphopt.compile(trainer.step)
    step(*data())
    seen = weakref.ref(trainer.model)
    del step, trainer
    gc.collect()
    assert seen() is None


def test_a_tensor_with_history_is_refused_with_its_name() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = nn.Parameter(torch.ones(())) * 2

    @graphopt.compile
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return update(F.cross_entropy(model(x) * scale, y), optimizer)

    with pytest.raises(graphopt.CaptureError, match="computed with gradients outside the step"):
        step(model, optimizer, *data())


def test_a_tensor_that_is_made_unseen_is_refused_as_such() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return update(
            F.cross_entropy(model(x) * torch.frombuffer(bytearray(4), dtype=torch.int32), y),
            optimizer,
        )

    with pytest.raises(graphopt.CaptureError, match=r"makes a tensor .* not seen") as caught:
        step(model, optimizer, *data())
    assert "torch.tensor(values)" in str(caught.value)
