"""When a step is captured again, when it is not, and what the log says about it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from twins import World, world
from zoo import MODELS, train_step

CASE = MODELS["mlp"]


class Run:
    """A compiled step with its world, warmed up to the steady state."""

    def __init__(self, step: Callable[..., Any] = train_step, model: str = "mlp") -> None:
        torch.manual_seed(0)
        self.world: World = world(step, model)
        self.step = graphopt.compile(step, pipeline="none")
        for i in range(2):
            self(*MODELS[model].batch(i))

    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        return self.step(self.world.model, self.world.optimizer, *batch, **kwargs)

    def captures(self) -> int:
        return len(self.step.captures)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why steps are captured again. Stages log what they do, and torch its own tracing."""
    said = [r.getMessage() for r in caplog.records if r.name.startswith("graphopt")]
    return [message for message in said if message.startswith("capturing ")]


def test_steady_state_is_not_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.DEBUG, logger="graphopt"):
        for i in range(5):
            run(*CASE.batch(i))
    assert run.captures() == 1
    assert messages(caplog) == []


def set_training(run: Run) -> None:
    run.world.model.eval()


def set_requires_grad(run: Run) -> None:
    run.world.model.head.bias.requires_grad_(False)


def set_weight_decay(run: Run) -> None:
    run.world.optimizer.param_groups[0]["weight_decay"] = 0.0


def set_maximize(run: Run) -> None:
    run.world.optimizer.param_groups[0]["maximize"] = True


def add_layer(run: Run) -> None:
    run.world.model.layers.append(nn.Linear(16, 16))


def add_buffer(run: Run) -> None:
    run.world.model.register_buffer("extra", torch.zeros(2))


def replace_parameter(run: Run) -> None:
    run.world.model.head.bias = nn.Parameter(torch.zeros(4))
    run.world.optimizer.param_groups[0]["params"][-1] = run.world.model.head.bias


def add_group(run: Run) -> None:
    last = run.world.optimizer.param_groups[0]["params"].pop()
    run.world.optimizer.add_param_group({"params": [last]})


def leave_a_gradient(run: Run) -> None:
    run.world.model.head.bias.grad = torch.ones(4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (set_training, "training"),
        (set_requires_grad, "requires_grad"),
        (set_weight_decay, "weight_decay"),
        (set_maximize, "maximize"),
        (add_layer, "layers"),
        (add_buffer, "extra"),
        (replace_parameter, "head.bias"),
        (add_group, "group"),
        (leave_a_gradient, "head.bias"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_change_is_captured_and_named(
    change: Callable[[Run], None], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    change(run)
    with caplog.at_level(logging.DEBUG, logger="graphopt"):
        run(*CASE.batch(2))
    assert run.captures() == 2
    (message,) = messages(caplog)
    assert word in message


def test_new_dtype_of_the_model_is_captured_and_named(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(model="convnet")
    x, y = MODELS["convnet"].batch(2)
    run.world.model.double()
    run.world.optimizer.state.clear()
    with caplog.at_level(logging.DEBUG, logger="graphopt"):
        run(x.double(), y)
    assert run.captures() == 2
    (message,) = messages(caplog)
    assert "features" in message


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda x, y: (x[:3], y[:3]), ["shape", "[3, 8]"]),
        (lambda x, y: (x, y.to(torch.uint8)), ["dtype", "uint8"]),
        (lambda x, y: (x.t().contiguous().t(), y), ["stride"]),
        (lambda x, y: (x.requires_grad_(), y), ["requires_grad"]),
    ],
    ids=["shape", "dtype", "strides", "requires_grad"],
)
def test_new_kind_of_batch_is_captured_and_named(
    batch: Callable[[Tensor, Tensor], Any], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y.long())

    run = Run(step)
    with caplog.at_level(logging.DEBUG, logger="graphopt"):
        run(*batch(*CASE.batch(2)))
    assert run.captures() == 2
    (message,) = messages(caplog)
    assert all(word in message for word in words), message


def test_structure_of_the_arguments_is_guarded(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        x, y = batch["x"], batch["y"]
        return train_step(model, optimizer, x, y)

    torch.manual_seed(0)
    w = world(step)
    compiled = graphopt.compile(step, pipeline="none")
    x, y = CASE.batch(0)
    for extra in ({}, {}, {"note": 1}, {"note": 2}, {"note": None}, {}):
        compiled(w.model, w.optimizer, {"x": x, "y": y, **extra})
    assert len(compiled.captures) == 3  # a number that nobody reads may change


def test_autocast_and_grad_mode_are_guarded() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            return train_step(model, optimizer, x, y)

    run = Run(step)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        first = run(*CASE.batch(2))
    assert run.captures() == 2
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        run(*CASE.batch(2))
    assert run.captures() == 2
    with torch.no_grad():
        run(*CASE.batch(2))
    assert run.captures() == 3
    assert first.dtype == torch.float32


def test_default_dtype_is_guarded() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        return loss + torch.zeros(1)

    run, batch = Run(step), CASE.batch(2)
    torch.set_default_dtype(torch.float64)
    try:
        assert run(*batch).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert run(*batch).dtype == torch.float32


def test_attributes_of_modules_are_guarded() -> None:
    """Plain attributes that a forward reads are constants of the capture."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(8, 4), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.scale

    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = graphopt.compile(train_step, pipeline="none")
    x, y = CASE.batch(0)
    first = step(model, optimizer, x, y)
    model.scale = 3.0
    second = step(model, optimizer, x, y)
    assert torch.equal(second, F.cross_entropy(model(x), y))
    assert not torch.equal(first, second)


def test_hooks_registered_later_are_captured() -> None:
    run = Run()
    x, y = CASE.batch(2)
    handle = run.world.model.head.register_forward_hook(lambda module, args, output: output * 2)
    run.world.optimizer.param_groups[0]["lr"] = 0.0
    run.world.optimizer.param_groups[0]["weight_decay"] = 0.0
    expected = F.cross_entropy(run.world.model(x), y)
    assert torch.equal(run(x, y), expected)
    handle.remove()
    assert torch.equal(run(x, y), F.cross_entropy(run.world.model(x), y))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def of_another_class(model: nn.Module) -> None:
    model.head.__class__ = Doubled


def with_attributes_of_its_own(model: nn.Module) -> None:
    vars(model)["extra"] = vars(model).copy()
    model.__dict__ = vars(model).pop("extra")
    model.head.register_forward_hook(lambda module, args, output: output * 2)


def with_a_hook_on_a_hooked_module(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda module, args, output: output * 2)


def with_a_list_edited(model: nn.Module) -> None:
    model.factors.append(2.0)


@pytest.mark.parametrize(
    "change",
    [
        of_another_class,
        with_attributes_of_its_own,
        with_a_hook_on_a_hooked_module,
        with_a_list_edited,
    ],
    ids=lambda change: change.__name__,
)
def test_changes_behind_the_back_of_torch(change: Callable[[nn.Module], None]) -> None:
    """The next call computes what the model computes now."""
    run = Run()
    model, (x, y) = run.world.model, CASE.batch(2)
    run.world.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    model.factors = [1.0]

    def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * sum(model.factors)

    model.head.register_forward_hook(scaled)
    for _ in range(2):
        assert torch.equal(run(x, y), F.cross_entropy(model(x), y))
    before = run.captures()
    change(model)
    for _ in range(2):
        assert torch.equal(run(x, y), F.cross_entropy(model(x), y))
    assert run.captures() == before + 1


def test_a_module_where_there_was_none() -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 4)
            self.register_module("last", None)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return x if self.last is None else self.last(x)

    model = Maybe()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = graphopt.compile(train_step, pipeline="none")
    x, y = CASE.batch(0)
    step(model, optimizer, x, y)
    for last in (nn.Softplus(), None, nn.Tanh()):
        model.last = last
        assert torch.equal(step(model, optimizer, x, y), F.cross_entropy(model(x), y))


def test_optimizers_of_two_kinds_with_the_same_groups() -> None:
    class Against(torch.optim.Optimizer):
        """Steps the other way."""

        def __init__(self, other: Optimizer) -> None:
            super().__init__(other.param_groups, {})
            self.param_groups, self.state = other.param_groups, other.state

        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=group["lr"])

    models = [nn.Linear(8, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    step = graphopt.compile(train_step, pipeline="none")
    x, y = CASE.batch(0)
    for train, model in zip((train_step, step), models, strict=True):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        against = Against(sgd)
        for optimizer in (sgd, sgd, against, against, sgd):
            train(model, optimizer, x, y)
    assert torch.equal(models[0].weight, models[1].weight)


def test_an_attribute_that_the_step_sets_is_no_change() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        model.last_input = x * 2
        return train_step(model, optimizer, x, y)

    run = Run(step)
    before = run.captures()
    kept = weakref.ref(run.world.model.last_input)
    for i in range(3):
        run(*CASE.batch(i))
    assert run.captures() == before
    assert kept() is None


def test_numbers_that_schedules_change_are_not_guarded() -> None:
    run = Run()
    for i in range(4):
        group = run.world.optimizer.param_groups[0]
        group["lr"], group["betas"] = 0.1 / (i + 1), (0.9 - 0.01 * i, 0.99)
        run(*CASE.batch(i))
    assert run.captures() == 1


def test_earlier_captures_stay_cached() -> None:
    run = Run()
    for size in (4, 3, 5, 3, 4, 5):
        run(*CASE.batch(0, size))
    assert run.captures() == 3


@pytest.mark.full
def test_many_shapes_lead_to_one_advice(caplog: pytest.LogCaptureFixture) -> None:
    """The advice comes once, and the steps go on."""
    run = Run()
    for size in range(5, 17):
        run(*CASE.batch(0, size))
    advice = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(advice) == 1
    assert "pad" in advice[0]
    assert "bucket" in advice[0]


def test_model_of_another_class_is_another_capture() -> None:
    run = Run()
    other = world(model="reused")
    for i in range(2):
        run.step(other.model, other.optimizer, *CASE.batch(i))
    assert run.captures() == 2
    run(*CASE.batch(3))
    assert run.captures() == 2


def test_captures_do_not_keep_a_model_alive() -> None:
    step = graphopt.compile(train_step, pipeline="none")
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, *CASE.batch(0))
    alive = weakref.ref(model.weight)
    step.reset()
    del model, optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "left"])
def test_hooks_do_not_keep_a_model_alive(removed: bool) -> None:
    compiled = graphopt.compile(train_step)
    w = world()

    def hook(module: nn.Module, args: Any, output: Tensor, model: nn.Module = w.model) -> None:
        assert model.training

    handle = w.model.head.register_forward_hook(hook)
    for i in range(2):
        compiled(w.model, w.optimizer, *MODELS["mlp"].batch(i))
    if removed:
        handle.remove()
    reference = weakref.ref(w.model)
    del w, hook
    gc.collect()
    assert (reference() is None) is removed


def test_a_dropped_model_is_freed() -> None:
    """Cached graphs do not keep models or their parameters alive."""
    compiled = graphopt.compile(train_step)
    w = world()
    for i in range(2):
        compiled(w.model, w.optimizer, *MODELS["mlp"].batch(i))
    assert len(compiled.captures) == 1
    references = [weakref.ref(w.model), weakref.ref(w.model.head.weight)]
    del w
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert len(compiled.captures) == 0
