"""What a step reads from outside its arguments: followed when it changes, or refused."""

from __future__ import annotations

import cProfile
import dis
import gc
import importlib
import itertools
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import graphopt
from graphopt._compat import frames
from outside_anew import ANEW
from outside_cases import CASES
from refusal import marked_lines

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 0])


def scaled_step(factor: Callable[[], Any]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) * factor()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class Trained:
    """A model, trained by a compiled step at rate 0, so that eager gives the same every time."""

    def __init__(self, step: Callable[..., Any], model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.step, self.compiled = step, graphopt.compile(step, pipeline="none")
        self.seen: dict[int, graphopt.CapturedStep] = {}

    def check(self) -> None:
        """A captured step gives what the eager one gives."""
        expected = self.step(self.model, self.optimizer, X, Y)
        assert torch.equal(self(), expected)

    def __call__(self) -> Tensor:
        loss: Tensor = self.compiled(self.model, self.optimizer, X, Y)
        self.seen.update((id(each), each) for each in self.compiled.captures)
        return loss

    @property
    def captures(self) -> int:
        """How often the step was captured. A capture that can never fit again is dropped."""
        return len(self.seen)


@pytest.mark.parametrize("name", CASES)
def test_change_is_followed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]()
    trained = Trained(scaled_step(next(case)))
    first = trained()
    for _ in range(2):
        trained.check()
    assert trained.captures == 1
    with caplog.at_level(logging.INFO, logger="graphopt"):
        next(case, None)
        changed = trained()
    trained.check()
    next(case, None)
    assert not torch.equal(changed, first)
    assert trained.captures == 2
    assert "read at " in caplog.text, caplog.text


# What the step changes itself


class Trainer:
    """The usual object around a model, of which one method is a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.micro, self.seen, self.table = 0, [0], {"n": 0}

    def accumulate(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        self.micro += 1
        if self.micro % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    every = 3

    def counts_in_a_list(
        self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> Tensor:
        self.seen[0] += 1
        factor = 0.5 if self.seen[0] < 100 else 1.0
        return train(model, optimizer, x, y, factor)

    def grows_a_list(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        self.seen.append(1)
        return train(model, optimizer, x, y, 1.0 if len(self.seen) > 4 else 0.5)

    def toggles(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        factor = 1.0 if self.micro else 0.5
        self.micro = 1 - self.micro
        return train(model, optimizer, x, y, factor)

    def only_counts(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        self.micro += 1
        self.table["n"] = self.table["n"] + 1
        return train(model, optimizer, x, y, 1.0)

    def sets_then_reads(
        self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> Tensor:
        self.factor = 0.5
        self.factor += 0.25
        return train(model, optimizer, x, y, self.factor)

    def sets_and_restores(
        self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> Tensor:
        before, self.micro = self.micro, 7
        loss = train(model, optimizer, x, y, float(self.micro))
        self.micro = before
        return loss

    def makes_on_first_use(
        self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> Tensor:
        if not hasattr(self, "made"):
            self.made = 0.5
        return train(model, optimizer, x, y, self.made)


ONES = itertools.repeat(1.0)
total = 0


def counts_globally(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    global total
    total += 1
    return train(model, optimizer, x, y, 1.0 if total < 1000 else 0.5)


def train(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, factor: float = 1.0
) -> Tensor:
    loss = F.cross_entropy(model(x), y) * factor
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


COUNTED = [
    *(("accumulate", every, 2 if every < 9 else 1) for every in (2, 3, 4, 1000)),
    ("counts_in_a_list", 3, 1),
    ("grows_a_list", 3, 2),
    ("toggles", 3, 2),
]


@pytest.mark.parametrize(("name", "every", "captures"), COUNTED)
def test_numbers_that_the_step_changes_and_reads(name: str, every: int, captures: int) -> None:
    eager, captured = Trainer(), Trainer()
    eager.every = captured.every = every
    eager.seen[0] = captured.seen[0] = 95
    compiled = graphopt.compile(getattr(captured, name), pipeline="none")
    for _ in range(9):
        expected = getattr(eager, name)(eager.model, eager.optimizer, X, Y)
        assert torch.equal(compiled(captured.model, captured.optimizer, X, Y), expected)
        assert (eager.micro, eager.seen) == (captured.micro, captured.seen)
    assert torch.equal(eager.model.weight, captured.model.weight)
    gradients = [parameter.grad is None for parameter in eager.model.parameters()]
    assert gradients == [parameter.grad is None for parameter in captured.model.parameters()]
    assert len(compiled.captures) <= 2 * captures


def test_a_global_in_which_the_step_counts() -> None:
    global total
    found = []
    compiled = graphopt.compile(counts_globally)
    for step in (counts_globally, compiled):
        trainer, total = Trainer(), 997
        for _ in range(5):
            loss = step(trainer.model, trainer.optimizer, X, Y)
            found.append((total, loss.item()))
    assert found[:5] == found[5:]
    assert len(compiled.captures) == 2


def refuse(step: Callable[..., Any], trainer: Trainer) -> None:
    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step, pipeline="none")(trainer.model, trainer.optimizer, X, Y)
    (line,) = marked_lines(getattr(step, "__func__", step))
    assert f"{__file__}:{line} " in str(caught.value)
    assert not re.search(r"\((.+) became \1\)", str(caught.value))


@pytest.mark.parametrize(
    "name", ["only_counts", "sets_then_reads", "sets_and_restores", "makes_on_first_use"]
)
def test_what_the_step_changes_without_reading_it_is_captured(name: str) -> None:
    eager, captured = Trainer(), Trainer()
    compiled = graphopt.compile(getattr(captured, name), pipeline="none")
    for _ in range(4):
        expected = getattr(eager, name)(eager.model, eager.optimizer, X, Y)
        assert torch.equal(compiled(captured.model, captured.optimizer, X, Y), expected)
        assert (eager.micro, eager.seen) == (captured.micro, captured.seen)
    assert torch.equal(eager.model.weight, captured.model.weight)
    assert len(compiled.captures) <= 1 + (name == "makes_on_first_use")


# What torch's own code reads


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.activation = nn.Linear(4, 2), nn.Softplus()
        self.options = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x)) * self.options.inner.z


class Holder:
    def __init__(self) -> None:
        self.inner = types.SimpleNamespace(z=1.0)


def set_attribute_of_a_held_object(t: Trained) -> None:
    t.model.options.inner.z = 2.0


def replace_forward_of_the_class(t: Trained) -> None:
    patch(Wrapped, "forward", lambda self, x: self.body(x))


def replace_forward_of_a_torch_class(t: Trained) -> None:
    patch(nn.Softplus, "forward", lambda self, x: x)


def replace_forward_of_the_module(t: Trained) -> None:
    t.model.forward = lambda x: t.model.body(x)


def replace_a_function_that_torch_calls(t: Trained) -> None:
    patch(F, "softplus", lambda x, beta, threshold: x)


def replace_the_step_of_the_optimizer(t: Trained) -> None:
    t.optimizer.step = lambda: t.model.body.weight.data.mul_(1.0)


def replace_the_step_of_the_class(t: Trained) -> None:
    patch(torch.optim.SGD, "step", lambda self: None)


def hook_before_steps(t: Trained) -> None:
    t.optimizer.register_step_pre_hook(lambda *args: None)


def hook_after_steps(t: Trained) -> None:
    t.optimizer.register_step_post_hook(lambda *args: None)


def hook_all_forwards(t: Trained) -> None:
    handles.append(
        torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: scaled(m, out))
    )


def hook_before_all_forwards(t: Trained) -> None:
    handles.append(
        torch.nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] * 2, *a[1:]))
    )


def hook_all_backwards(t: Trained) -> None:
    handles.append(torch.nn.modules.module.register_module_full_backward_hook(twice_backwards))


def hook_all_optimizers(t: Trained) -> None:
    handles.append(register_optimizer_step_post_hook(lambda *args: None))


def loss_outside_the_arguments(t: Trained) -> None:
    CRITERION.label_smoothing = 0.2


def loss_in_another_mode(t: Trained) -> None:
    CRITERION.eval()


def scaled(module: nn.Module, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Softplus) else output


def twice_backwards(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if i is None else i * 2 for i in inputs)


handles: list[Any] = []
patches: list[tuple[Any, str, Any]] = []
CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1)


def patch(owner: Any, name: str, value: Any) -> None:
    patches.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    while handles:
        handles.pop().remove()
    while patches:
        setattr(*patches.pop())
    CRITERION.label_smoothing = 0.1


def with_a_criterion(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = CRITERION(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


CHANGES = [
    set_attribute_of_a_held_object,
    replace_forward_of_the_class,
    replace_forward_of_a_torch_class,
    replace_forward_of_the_module,
    replace_a_function_that_torch_calls,
    replace_the_step_of_the_optimizer,
    replace_the_step_of_the_class,
    hook_before_steps,
    hook_after_steps,
    hook_all_forwards,
    hook_before_all_forwards,
    hook_all_backwards,
    hook_all_optimizers,
    loss_outside_the_arguments,
    loss_in_another_mode,
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch's, in eager
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_of_what_torch_reads(change: Callable[[Trained], None], restored: None) -> None:
    trained = Trained(with_a_criterion, Wrapped())
    for _ in range(3):
        trained.check()
    assert trained.captures == 1
    change(trained)
    try:
        trained.check()
    except graphopt.CaptureError:
        return
    assert trained.captures == 2


# Who else looks at the program that runs


def test_a_tracer_that_is_running_goes_on() -> None:
    """As coverage tools and debuggers do."""
    seen: set[str] = set()

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        seen.add(f"{event} {frame.f_code.co_name}")
        return tracer

    beta = 0.5
    trained = Trained(scaled_step(lambda: beta))
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        trained()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert {"call step", "line step", "return step"} <= seen
    beta = 0.7
    trained.check()
    assert trained.captures == 2


def test_a_profiler_that_is_running_goes_on() -> None:
    beta = 0.5
    trained = Trained(scaled_step(lambda: beta))
    profiler = cProfile.Profile()
    profiler.enable()
    trained()
    profiler.disable()
    beta = 0.7
    trained.check()
    assert trained.captures == 2
    assert any(entry.code == trained.step.__code__ for entry in profiler.getstats())


def test_ranges_for_the_profiler_are_those_of_the_trace() -> None:
    """They are no part of the graph, and the profile of a first call has them, the user's among
    them; those within a function of torch's as well."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.profiler.record_function("the user's range"):
            return model(x).square().mean()

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        run = graphopt.compile(step) if compiled else step
        with torch.profiler.profile() as profile:
            losses = [run(model, optimizer, torch.randn(4, 3))]
        names = {event.key for event in profile.key_averages()}
        assert {"the user's range", "Optimizer.step#Adam.step"} <= names
        losses.append(run(model, optimizer, torch.randn(4, 3)))
        results.append([*losses, *model.parameters()])
    assert all(map(torch.equal, *results))
    assert "record_function" not in run.graph_module.code


@pytest.mark.parametrize(
    "module", ["nn.functional", "nn.modules.module", "optim.adam", "functional", "_tensor"]
)
def test_global_names_are_read_as_dis_reads_them(module: str) -> None:
    values = vars(importlib.import_module(f"torch.{module}")).values()
    functions = [f for f in values if isinstance(f, types.FunctionType)]
    assert functions
    for function in functions:
        found: dict[Any, None] = {}
        shown = ("CACHE", "EXTENDED_ARG")
        steps = [i for i in dis.get_instructions(function) if i.opname not in shown]
        for load, after in itertools.pairwise(steps):
            if load.opname == "LOAD_GLOBAL":
                taken = after.opname in ("LOAD_ATTR", "LOAD_METHOD")
                found[load.argval, after.argval if taken else None] = None
        assert frames.loaded_globals(function.__code__) == tuple(found)


def test_what_a_step_reads_is_not_kept_alive() -> None:
    trainer = Trainer()
    compiled = graphopt.compile(lambda m, o, x, y: train(m, o, x, y, box[0].every))
    box = [trainer]
    compiled(trainer.model, trainer.optimizer, X, Y)
    alive = weakref.ref(trainer.model)
    box.clear()
    del trainer
    gc.collect()
    assert alive() is None


def test_equal_numbers_are_no_change() -> None:
    values = {"beta": 1000.5, "name": "a b"}
    trained = Trained(scaled_step(lambda: values["beta"] if values["name"] else 0.0))
    for number in range(5):
        trained.check()
        values.update(beta=float(f"{1000.5 + 0 * number}"), name="".join(["a", " b"]))
    assert trained.captures == 1


# What is made anew for every call


@pytest.mark.parametrize("name", ANEW)
def test_equal_objects_made_anew_for_every_call(name: str) -> None:
    """They are no reason to capture again; a change in one of them is."""
    held = types.SimpleNamespace()
    make, read = ANEW[name]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x, y, read(held.given))

    trained = Trained(step)
    for number in range(6):
        held.given = make(0.5, number)
        trained.check()
    assert trained.captures == 1
    held.given = make(0.75, 0)
    trained.check()
    assert trained.captures == 2


def _smoother(loss: nn.Module) -> None:
    loss.label_smoothing = 0.5


def _hooked(loss: nn.Module) -> None:
    loss.register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.parametrize("change", [_smoother, _hooked, nn.Module.eval])
def test_a_change_in_a_loss_function_made_anew_is_followed(
    change: Callable[[nn.Module], Any],
) -> None:
    held = types.SimpleNamespace()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = held.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    trained = Trained(step)
    for _ in range(4):
        held.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        trained.check()
    assert trained.captures == 1
    change(held.loss)
    trained.check()
    assert trained.captures == 2


def test_object_whose_identity_matters_is_not_exchanged() -> None:
    first = held = types.SimpleNamespace(beta=0.5)
    trained = Trained(scaled_step(lambda: 1.0 if held is first else held.beta))
    trained.check()
    held = types.SimpleNamespace(beta=0.5)
    trained.check()
    assert trained.captures == 2


def test_what_the_step_returns_from_outside_is_not_exchanged() -> None:
    stats = {"epoch": 1}

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        return train(model, optimizer, x, y), stats

    trained = Trained(step)
    for epoch in (1, 1, 2, 2):
        stats = {"epoch": epoch}
        assert trained()[1]["epoch"] == epoch
