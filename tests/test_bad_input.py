"""What cannot be captured: refused with the line and the way out, and nothing is changed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from refusal import CASE, Snapshot, fresh, refused
from twins import Twins, World
from zoo import MLP, MODELS, train_step


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


@pytest.mark.parametrize("step", [appends_to_a_global, adds_to_a_global])
def test_tensor_kept_by_the_step(step: Callable[..., Any]) -> None:
    """Also in a list or set that was there when conftest.py called `gc.freeze`."""
    history.clear()
    kept.clear()
    assert gc.get_freeze_count()
    assert "outside its arguments" in str(refused(step, fresh()))
    assert not history and not kept


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
def test_hooks_that_print_are_refused(hook: Callable[..., Any]) -> None:
    w = fresh()
    if hook is print_gradient:
        w.model.head.weight.register_hook(hook)
    else:
        w.model.head.register_forward_hook(hook)
    with pytest.raises(graphopt.CaptureError, match="it prints"):
        graphopt.compile(train_step)(w.model, w.optimizer, *CASE.batch(0))


def test_writing_a_file(tmp_path: Any) -> None:
    target = tmp_path / "loss.txt"

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        with target.open("a") as file:  # HERE
            file.write("step")
        return loss

    refused(step, fresh(step))
    assert not target.exists()


SMALL_MODEL = MODELS["mlp"]


@pytest.fixture
def single_rank_group(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_model_wrapped_in_ddp(single_rank_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(MLP())
    w = World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    error = str(refused(train_step, w))
    assert "DistributedDataParallel" in error
    assert "graphopt.DataParallel" in error


def test_part_of_the_model_wrapped_in_ddp(single_rank_group: None) -> None:
    model = MLP()
    model.head = nn.parallel.DistributedDataParallel(model.head)
    w = World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    assert "DistributedDataParallel" in str(refused(train_step, w))


def test_model_wrapped_in_fsdp(single_rank_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = MLP()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    w = World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    error = str(refused(train_step, w))
    assert "FSDP" in error


def test_compiled_submodule() -> None:
    model = MLP()
    model.head = torch.compile(model.head, backend="eager")
    w = World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    assert "torch.compile" in str(refused(train_step, w))


def test_submodule_compiled_in_place() -> None:
    model = MLP()
    model.head.compile(backend="eager")
    w = World(train_step, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    assert "compile" in str(refused(train_step, w))


def test_compiled_function_inside_the_step() -> None:
    loss_of = torch.compile(F.cross_entropy, backend="eager")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)  # HERE
        loss.backward()
        optimizer.step()
        return loss

    assert "compile" in str(refused(step, fresh(step)))


class Counting(torch.optim.SGD):
    """SGD whose rate falls with a Python count of its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 1

    def step(self, closure: Any = None) -> None:
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad / self.count)


def test_optimizer_that_counts_in_an_attribute() -> None:
    def build() -> World:
        model = MLP()
        return World(train_step, [model], [Counting(model.parameters())])

    twins = Twins(build)
    for number in range(5):
        twins.step(*SMALL_MODEL.batch(number))
    twins.finish(captures=1)
    for w in (twins.eager, twins.captured):
        assert isinstance(w.optimizer, Counting) and w.optimizer.count == 6


# Optimizers and scalers


@pytest.mark.parametrize("kind", [torch.optim.LBFGS], ids=lambda kind: kind.__name__)
def test_optimizer_that_cannot_be_captured(kind: type[Optimizer]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    torch.manual_seed(0)
    model = MLP()
    w = World(step, [model], [kind(model.parameters(), lr=1e-2)])
    error = str(refused(step, w))
    assert kind.__name__ in error
    assert "AdamW" in error  # an optimizer to use instead


# Steps that are none


def needs_no_gradient(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(x[:, :4], y)
    loss.backward()  # HERE
    optimizer.step()
    return loss


def without_gradients(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    loss.backward()  # HERE
    optimizer.step()
    return loss


def returns_a_generator(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = train_step(model, optimizer, x, y)
    return (part for part in [loss])


def raises(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    raise LookupError("no such example")  # HERE


def wrong_shapes(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return model(x.t())


NO_STEPS = [
    (needs_no_gradient, "gradient"),
    (without_gradients, "gradient"),
    (returns_a_generator, "generator"),
    (raises, "no such example"),
]


@pytest.mark.parametrize(("step", "word"), NO_STEPS, ids=lambda v: getattr(v, "__name__", ""))
def test_steps_that_are_none(step: Callable[..., Any], word: str) -> None:
    assert word in str(refused(step, fresh(step)))


def test_error_inside_the_model_names_a_line_and_keeps_its_cause() -> None:
    w = fresh()
    snapshot = Snapshot(w.models, w.optimizers)
    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(wrong_shapes, pipeline="none")(w.model, w.optimizer, *SMALL_MODEL.batch(0))
    snapshot.assert_unchanged()
    error = caught.value
    assert "zoo.py" in str(error)  # the line of the model that got the wrong shape
    assert isinstance(error.__cause__, RuntimeError)


def test_model_on_another_device_than_the_batch() -> None:
    x, y = SMALL_MODEL.batch(0)
    error = str(refused(train_step, fresh(), lines_of=MLP.forward, batch=(x.to("meta"), y)))
    assert "device" in error
    assert ".to(" in error


@pytest.mark.parametrize("what", [3, "step", MLP(), torch.zeros(1)], ids=lambda v: type(v).__name__)
def test_compile_of_something_else(what: Any) -> None:
    with pytest.raises(TypeError, match="step function"):
        graphopt.compile(what)


def test_unknown_options() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        graphopt.compile(train_step, pipeline="nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        graphopt.compile(train_step, verify="nonsense")
    with pytest.raises(TypeError, match="pipelin"):
        graphopt.compile(train_step, pipelin="none")


def test_errors_inherit_from_what_python_users_expect() -> None:
    assert issubclass(graphopt.CaptureError, RuntimeError)
    assert issubclass(graphopt.SpmdMismatchError, RuntimeError)
    assert issubclass(graphopt.PipelineSyntaxError, ValueError)
    for name in ("CaptureError", "SpmdMismatchError", "PipelineSyntaxError", "VerificationError"):
        assert issubclass(getattr(graphopt, name), graphopt.GraphOptError)


def test_a_step_can_be_captured_after_its_error() -> None:
    """The same step object, with an argument that avoids the refused branch."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, check: bool) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if check and max([loss], key=float) > 0:  # HERE
            return loss
        loss.backward()
        optimizer.step()
        return loss

    captured, eager = fresh(), fresh()
    compiled = graphopt.compile(step, pipeline="none")
    with pytest.raises(graphopt.CaptureError):
        compiled(captured.model, captured.optimizer, *SMALL_MODEL.batch(0), True)
    for i in range(3):
        expected = step(eager.model, eager.optimizer, *SMALL_MODEL.batch(i), False)
        actual = compiled(captured.model, captured.optimizer, *SMALL_MODEL.batch(i), False)
        assert torch.equal(actual, expected)


def test_an_error_leaves_a_cached_capture_working() -> None:
    captured, eager = fresh(), fresh()
    compiled = graphopt.compile(train_step, pipeline="none")
    x, y = SMALL_MODEL.batch(0)
    for batch in ((x, y), (x, y), (x[:, :5], y), (x, y)):
        if batch[0].shape[1] != 8:
            with pytest.raises(graphopt.CaptureError):
                compiled(captured.model, captured.optimizer, *batch)
            continue
        expected = train_step(eager.model, eager.optimizer, *batch)
        assert torch.equal(compiled(captured.model, captured.optimizer, *batch), expected)
