"""Modules and tensors that a step is found to use: by one trace, and in the next graph."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from graphopt.tracing.inputs.named_in_code import named_in


class Trainer:
    """A model, an optimizer and a tensor in an object that is no module."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.weights = nn.Linear(3, 2), torch.rand(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.asked = 0

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.weights).square().mean()

    def update(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return self.update(x)

    @functools.cached_property
    def average(self) -> nn.Module:
        self.asked += 1
        return nn.Linear(3, 2)

    def left(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


Style = Callable[[Trainer], Callable[[Tensor], Tensor]]


def in_closure(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    model, optimizer, weights = trainer.model, trainer.optimizer, trainer.weights

    def loss_of(x: Tensor) -> Tensor:
        return (model(x) * weights).square().mean()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_object(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    return lambda x: trainer.update(x)


def in_attributes(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    held = SimpleNamespace(of=SimpleNamespace(trainer=trainer))

    @torch.enable_grad()
    def step(x: Tensor) -> Tensor:
        return held.of.trainer(x)

    return step


def in_lists(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    models, optimizers = [trainer.model], (trainer.optimizer,)

    def step(x: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum((model(x) * trainer.weights).square().mean() for model in models)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


STYLES: list[Style] = [
    in_closure,
    in_object,
    in_attributes,
    in_lists,
    lambda trainer: trainer,
    lambda trainer: trainer.update,
    lambda trainer: functools.partial(trainer.update),
]


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_traced_to_find_it(style: Style, traces: list[int]) -> None:
    captured, eager = Trainer(), Trainer()
    step, reference = graphopt.compile(style(captured)), style(eager)
    for _ in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), reference(x))
        assert captured.left() == eager.left()
    assert traces[0] <= 2  # the next step, which finds gradients, may be traced besides


def test_what_may_be_left_alone_is_not_named() -> None:
    trainer, other = Trainer(), nn.Linear(3, 2)

    def step(x: Tensor, more: bool = False) -> Tensor:
        if more:
            other(x)
        else:
            trainer.average(x)
        while more:
            more = bool(other.training)
        return trainer.loss(x)

    found = named_in(step, (torch.ones(1, 3),), {})
    assert [name for name, _ in found.objects] == ["trainer.model"]
    assert [name for name, _ in found.tensors] == ["trainer.weights", "x"]
    assert trainer.asked == 0


def test_what_is_named_and_left_alone_is_no_input() -> None:
    trainer, other, unused = Trainer(), nn.Linear(3, 2), torch.rand(3)

    def step(x: Tensor) -> Tensor:
        assert other is not None and unused is not None
        return trainer.update(x)

    captured = graphopt.compile(step)
    eager = Trainer()
    x = torch.rand(4, 3)
    assert torch.equal(captured(x), eager.update(x))
    besides = captured.captures[-1].besides
    objects = {reference() for _, reference in besides.objects}
    assert objects == {trainer.model, trainer.optimizer}
    assert [tensor for _, tensor in besides.tensors] == [trainer.weights]


def test_what_cannot_be_captured_may_be_named() -> None:
    trainer, parallel = Trainer(), nn.DataParallel(nn.Linear(3, 2))
    parallel.device_ids = [0]

    def step(x: Tensor) -> Tensor:
        assert parallel is not None
        return trainer.update(x)

    x = torch.rand(4, 3)
    assert torch.equal(graphopt.compile(step)(x), Trainer().update(x))


def test_another_one_in_its_place_is_used() -> None:
    trainer, eager = Trainer(), Trainer()
    step = graphopt.compile(in_object(trainer))
    for seed in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), eager.update(x))
        torch.manual_seed(seed)
        trainer.weights = eager.weights = torch.rand(2)


def test_a_module_within_another_is_named_as_part_of_it() -> None:
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, weight = whole[0], whole[1].weight

    def step(x: Tensor) -> Tensor:
        loss = (whole(x).sum() + first(x).sum()) * weight.sum()
        loss.backward()
        return loss.detach()

    captured = graphopt.compile(step)
    captured(torch.rand(4, 3))
    assert [name for name, _ in captured.captures[-1].besides.objects] == ["whole"]
    assert not captured.captures[-1].besides.tensors


class Counting(Optimizer):
    """Counts in an attribute, in its group and in its state, and needs a parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0
        self.state["all"] = {"seen": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["all"]["seen"] += 1
        for group in self.param_groups:
            group["k"] += 1
            first = group["params"][0]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])
            first.mul_(0.999)


class Average:
    """As people keep it: a copy of the model, by its `state_dict`, and a count."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.updates = copy.deepcopy(model).eval(), 0
        for p in self.model.parameters():
            p.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        now = model.state_dict()
        for key, value in self.model.state_dict().items():
            if value.dtype.is_floating_point:
                value *= 0.9
                value += 0.1 * now[key].detach()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "counting": Counting,
}


class Loop:
    def __init__(self, kind: str, average: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.average = Average(self.model) if average else None

    def step(self, x: Tensor, number: int) -> Tensor:
        loss = self.model(x).square().mean()
        (loss / 2).backward()
        if number % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.average:
                self.average.update(self.model)
        return loss.detach()

    def left(self) -> list[Any]:
        found: list[Any] = [*self.model.state_dict().values()]
        if self.average:
            found += [*self.average.model.state_dict().values(), self.average.updates]
        found += [group["lr"] for group in self.optimizer.param_groups]
        found += [group.get("k") for group in self.optimizer.param_groups]
        for state in self.optimizer.state.values():
            found += [(key, value) for key, value in state.items()]
        return [*found, getattr(self.optimizer, "calls", None)]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("gradients", [False, True])
def test_as_in_eager_code(kind: str, gradients: bool) -> None:
    captured, eager = Loop(kind), Loop(kind)
    step = graphopt.compile(captured.step)
    if gradients:  # real ones, before anything is captured
        for loop in (captured, eager):
            loop.model(torch.ones(3, 4)).sum().backward()
    for number in range(6):
        x = torch.rand(5, 4)
        assert torch.equal(step(x, number), eager.step(x, number))
        assert alike(captured.left(), eager.left())


def test_one_trace_finds_all(traces: list[int]) -> None:
    step = graphopt.compile(Loop("adamw").step)
    step(torch.rand(5, 4), 0)
    assert traces[0] == 2  # the one that finds them, and the step itself


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_refused_capture_leaves_the_optimizer_alone(kind: str) -> None:
    loop, reference = Loop(kind, average=False), Loop(kind, average=False)
    loop.model(torch.ones(3, 4)).sum().backward()
    reference.model(torch.ones(3, 4)).sum().backward()
    groups = [(group, group["params"]) for group in loop.optimizer.param_groups]

    def step(x: Tensor) -> Tensor:
        loss = loop.step(x, 0)
        torch.manual_seed(7)  # which no graph can do
        return loss

    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(torch.rand(5, 4))
    assert alike(loop.left(), reference.left())
    for (group, params), now in zip(groups, loop.optimizer.param_groups, strict=True):
        assert now is group
        assert len(now["params"]) == len(params) > 0
        assert all(a is b for a, b in zip(now["params"], params, strict=True))


UPDATES, AVERAGES, OTHER = 1, 2, 3


class Program:
    """A model, an optimizer, an average, a tensor and other models, all in closures."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.average = nn.Linear(3, 2), nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.weights = torch.rand(2)
        self.others = [nn.Linear(3, 2) for _ in range(3)]

    def step(self, x: Tensor, what: int) -> Tensor:
        loss = (self.model(x) * self.weights).square().mean()
        loss.backward()
        if what:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if what == AVERAGES:
            with torch.no_grad():
                for mine, theirs in zip(
                    self.average.parameters(), self.model.parameters(), strict=True
                ):
                    mine.lerp_(theirs, 0.1)
        if what >= OTHER:
            loss = loss + self.others[what - OTHER](x).sum()
        return loss.detach()

    def left(self) -> list[Any]:
        tensors = [*self.model.parameters(), *self.average.parameters()]
        return [tensor.tolist() for tensor in tensors]


def test_the_next_graph_has_it_from_the_beginning(traces: list[int]) -> None:
    captured, eager = Program(), Program()
    step = graphopt.compile(captured.step)
    used = []
    for what in (AVERAGES, UPDATES, 0, AVERAGES, OTHER, OTHER + 1, 0):
        before, x = traces[0], torch.rand(4, 3)
        assert torch.equal(step(x, what), eager.step(x, what))
        assert captured.left() == eager.left()
        names = {name.rpartition(".")[2] for name, _ in step.captures[-1].besides.objects}
        used.append((traces[0] - before, names))
    assert used[1][1] == used[4][1] - {"others[0]"} == {"model", "optimizer"}
    assert used[2][1] == {"model"}
    numbers = [number for number, _ in used]
    assert numbers[3] < numbers[0]
    assert "others[1]" in str(used[5][1]) and "others[0]" not in str(used[5][1])


def test_another_shape_costs_no_trace_to_find_it_again(traces: list[int]) -> None:
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), UPDATES)
    step(torch.rand(4, 3), UPDATES)
    before = traces[0]
    step(torch.rand(5, 3), UPDATES)
    assert traces[0] - before == 1  # in which nothing runs that has not been repeated


def test_what_is_remembered_is_not_kept_alive() -> None:
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), OTHER)
    gone = weakref.ref(program.others[0])
    program.others[0] = nn.Linear(3, 2)
    gc.collect()
    assert gone() is None
    step(torch.rand(4, 3), OTHER)
    step(torch.rand(4, 3), UPDATES)


def test_what_is_used_by_no_graph_can_be_anything() -> None:
    """A module that an earlier graph used, and that no graph could use any more."""
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), OTHER)
    program.others[0].register_parameter("odd", nn.Parameter(torch.rand(2).to_sparse()))
    assert step(torch.rand(4, 3), UPDATES).ndim == 0
