"""Fused optimizers that compiled code calls, among the operators that compute gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import graphopt
from graphopt.ir.operators import fused_optimizer
from graphopt.lowering import Options
from zoo import MODELS, OPTIMIZERS, train_step

LOWER = Options(min_ops=1)

Step = Callable[..., Any]


def fused_updates(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if fused_optimizer(node.target) is not None]


def gap(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


class Pair:
    """One training, eager and compiled, in float64 so that only what is wrong makes a difference.

    Every large parameter is updated behind its gradient.
    """

    def __init__(self, step: Step, model: str, optimizer: str, **schedule: Any) -> None:
        self.models, self.optimizers, self.schedules = [], [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(MODELS[model].make().double())
            self.optimizers.append(OPTIMIZERS[optimizer](self.models[-1].parameters()))
            if schedule:
                self.schedules.append(OneCycleLR(self.optimizers[-1], **schedule))
        pipeline = "schedule_updates(larger_than_mb=0)"
        self.compiled = graphopt.compile(step, pipeline=pipeline, lower=LOWER)
        self._steps = [step, self.compiled]
        self._case = MODELS[model]

    def train(self, steps: int) -> float:
        """The largest difference afterwards."""
        for index in range(steps):
            x, y = self._case.batch(index)
            x = x.double() if x.is_floating_point() else x
            for step, model, optimizer in zip(
                self._steps, self.models, self.optimizers, strict=True
            ):
                step(model, optimizer, x, y)
            for schedule in self.schedules:
                schedule.step()
        self.compiled.flush()
        return gap(*self.models)

    def outside(self) -> list[fx.Node]:
        """Fused optimizers that compiled code does not call."""
        (region,) = self.compiled.lowered
        inside = len(fused_updates(region.graph_module.graph))
        everywhere = fused_updates(self.compiled.graph_module.main_gm.graph)
        assert all(node.target.overloadpacket for node in everywhere)
        return everywhere[inside:]


@pytest.mark.parametrize(
    "optimizer", ["adagrad-fused", "adamw-amsgrad-fused", "sgd-nesterov-fused"]
)
def test_training(optimizer: str) -> None:
    pair = Pair(train_step, "mlp", optimizer)
    assert pair.train(4) < 1e-12
    assert not pair.outside()


@pytest.mark.parametrize("model", ["convnet", "recurrent"])
def test_models(model: str) -> None:
    pair = Pair(train_step, model, "sgd-momentum-fused")
    assert pair.train(4) < 1e-9


def test_numbers_that_change_in_each_step_are_no_reason_to_compile_again() -> None:
    pair = Pair(train_step, "mlp", "adamw-fused", max_lr=0.1, total_steps=20)
    assert pair.train(12) < 1e-12
    (region,) = pair.compiled.lowered
    assert not pair.outside()
    assert region.failure is None
    assert len(region._compiled) == 1


def test_the_first_step_is_compiled() -> None:
    pair = Pair(train_step, "mlp", "adamw-fused")
    pair.train(1)
    assert [region.is_compiled for region in pair.compiled.lowered] == [True]


def test_state_is_updated_in_place() -> None:
    pair = Pair(train_step, "mlp", "adamw-fused")
    pair.train(2)
    model, optimizer = pair.models[1], pair.optimizers[1]
    tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    where = [tensor.data_ptr() for tensor in tensors]
    assert pair.train(2) < 1e-12
    after = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    assert [tensor.data_ptr() for tensor in after] == where


def returns_new_weights(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([p.detach().square().sum() for p in model.parameters()]).sum()


def reads_old_weights(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    old = [parameter.detach().clone() for parameter in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    pairs = zip(old, model.parameters(), strict=True)
    return torch.stack([(a - b.detach()).abs().max() for a, b in pairs]).max()


def keeps_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


def runs_again(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """As of a discriminator that has just been updated."""
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(x).detach()


def returned(run: Step, model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """What four steps return."""
    batches = [MODELS["mlp"].batch(index) for index in range(4)]
    return [run(model, optimizer, x.double(), y) for x, y in batches]


@pytest.mark.parametrize(
    "step", [returns_new_weights, reads_old_weights, keeps_gradients, runs_again]
)
@pytest.mark.parametrize("pipeline", ["none", "schedule_updates(larger_than_mb=0)"])
def test_what_the_step_reads_is_right(step: Step, pipeline: str) -> None:
    results = []
    for run in (step, graphopt.compile(step, pipeline=pipeline, lower=LOWER)):
        torch.manual_seed(0)
        model = MODELS["mlp"].make().double()
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        outputs = returned(run, model, optimizer)
        results.append([outputs, model.state_dict(), [p.grad for p in model.parameters()]])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu() * self.scale)


def scales_ones(*shape: int) -> Step:
    """A step that reads the scale before its update, by a product that is used afterwards."""

    def step(model: Scaled, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        scaled = torch.ones(shape, dtype=x.dtype) * model.scale
        optimizer.step()
        optimizer.zero_grad()
        return scaled.detach().sin() + loss.detach()

    return step


# Of a product with ones of the scale's own shape Inductor takes the scale for the product.
@pytest.mark.parametrize(
    ("step", "inside"),
    [(train_step, True), (scales_ones(4, 16), True), (scales_ones(16), False)],
    ids=["train_step", "another shape", "its own shape"],
)
def test_products_with_parameters(step: Step, inside: bool) -> None:
    results = []
    for run in (step, graphopt.compile(step, pipeline="none", lower=LOWER)):
        torch.manual_seed(0)
        model = Scaled().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        results.append([returned(run, model, optimizer), model.state_dict()])
    updates = [len(fused_updates(region.graph_module.graph)) for region in run.lowered]
    assert any(updates) == inside
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


@pytest.mark.parametrize("step", [train_step, runs_again])
def test_convolutions(step: Step) -> None:
    """They run channels-last; ATen's optimizers go through memory in one order."""
    results = []
    for lower in (None, LOWER):
        torch.manual_seed(0)
        model = Images().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        run = graphopt.compile(step, pipeline="schedule_updates(larger_than_mb=0)", lower=lower)
        outputs = []
        for index in range(3):
            torch.manual_seed(index)
            batch = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randint(3, (4,))
            outputs.append(run(model, optimizer, *batch))
        results.append([outputs, {name: v.clone() for name, v in model.state_dict().items()}])
    inside = [len(fused_updates(region.graph_module.graph)) for region in run.lowered]
    assert any(inside) == (step is train_step)
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
