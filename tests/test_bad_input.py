"""What cannot be captured is refused with its line and the way out, and nothing is changed.

Each step marks the line that its error has to name with `# HERE`.
"""

from __future__ import annotations

import inspect
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
from torch.optim.lr_scheduler import StepLR

import graphopt
from snapshot import Snapshot
from twins import World, world
from zoo import MLP, MODELS, train_step

CASE = MODELS["mlp"]


def marked_lines(function: Callable[..., Any]) -> list[int]:
    """The lines of `function` that end in `# HERE`, or all of them."""
    source, first = inspect.getsourcelines(function)
    marked = [first + i for i, text in enumerate(source) if text.rstrip().endswith("# HERE")]
    return marked or list(range(first, first + len(source)))


def refused(
    step: Callable[..., Any],
    w: World,
    *args: Any,
    lines_of: Callable[..., Any] | None = None,
    batch: tuple[Any, ...] | None = None,
) -> graphopt.GraphOptError:
    """Call the compiled step, and return its error once location, hint and state are checked."""
    snapshot = Snapshot(w.models, w.optimizers)
    compiled = graphopt.compile(step, pipeline="none")
    with pytest.raises(graphopt.CaptureError) as caught:
        compiled(*w.models, *w.optimizers, *(CASE.batch(0) if batch is None else batch), *args)
    snapshot.assert_unchanged()
    assert len(compiled.captures) == 0
    text = str(caught.value)
    lines = marked_lines(lines_of or step)
    file = inspect.getsourcefile(lines_of or step)
    assert any(f"{file}:{line}" in text for line in lines), f"{lines} not in {text}"
    assert "hint:" in text
    return caught.value


def fresh(step: Callable[..., Any] = train_step) -> World:
    """A world in the middle of training: optimizer state and gradients exist."""
    torch.manual_seed(0)
    w = world(step)
    for i in range(2):
        train_step(w.model, w.optimizer, *CASE.batch(i))
    F.cross_entropy(w.model(CASE.batch(0)[0]), CASE.batch(0)[1]).backward()
    return w


def prints_the_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(loss)  # HERE
    return loss


def formats_the_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss, f"loss {loss}"  # HERE


def formats_a_number(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return f"loss {loss.item():.3f}"  # HERE


def branches_on_the_loss(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    if loss > 0:  # HERE
        loss.backward()
        optimizer.step()
    return loss


def branches_on_an_item(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if loss.item() < 100:  # HERE
        optimizer.step()
    return loss


def branches_on_a_norm(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):  # HERE
        optimizer.step()
    optimizer.zero_grad()
    return loss


def converts_to_numpy(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = train_step(model, optimizer, x, y)
    return loss.detach().numpy()  # HERE


def converts_to_float(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    return float(train_step(model, optimizer, x, y))  # HERE


def selects_by_mask(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    keep = y > 0
    if not keep.any():  # HERE
        return x.sum()
    return train_step(model, optimizer, x[keep], y[keep])


def demands_finite(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # HERE
    optimizer.step()
    return norm


VALUES = [
    (prints_the_loss, "print"),
    (formats_the_loss, "return"),
    (formats_a_number, "return"),
    (branches_on_the_loss, "torch.where"),
    (branches_on_an_item, "torch.where"),
    (branches_on_a_norm, "torch.where"),
    (converts_to_numpy, "numpy"),
    (converts_to_float, "return"),
    (selects_by_mask, "torch.where"),
    (demands_finite, "torch.where"),
]


@pytest.mark.parametrize(("step", "word"), VALUES, ids=lambda v: getattr(v, "__name__", ""))
def test_values_of_tensors_in_python(step: Callable[..., Any], word: str) -> None:
    assert word in str(refused(step, fresh(step)))


# What a step reads or changes outside its arguments

calls = 0
offset = torch.zeros(4)
history: list[Tensor] = []


def counts_in_an_attribute(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    model.calls += 1
    loss = F.cross_entropy(model(x), y) * model.calls
    loss.backward()
    optimizer.step()
    return loss


def counts_in_a_global(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    global calls
    calls += 1
    loss = F.cross_entropy(model(x), y) * calls  # HERE
    loss.backward()
    optimizer.step()
    return loss


def draws_from_random(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = random.random()  # HERE
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()
    optimizer.step()
    return loss


def draws_from_numpy(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    scale = numpy.random.rand()  # HERE
    loss = F.cross_entropy(model(x), y) * scale
    loss.backward()
    optimizer.step()
    return loss


def branches_at_random(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    if random.random() < 2:  # HERE
        return train_step(model, optimizer, x, y)
    return x


def reads_a_global_tensor(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x) + offset  # HERE
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    return loss


def seeds_the_generator(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)  # HERE
    return train_step(model, optimizer, x, y)


def appends_to_a_global(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, y)
    history.append(loss.detach())
    return loss


OUTSIDE = [
    (counts_in_an_attribute, "calls"),
    (counts_in_a_global, "argument"),
    (draws_from_random, "random"),
    (draws_from_numpy, "random"),
    (branches_at_random, "random"),
    (reads_a_global_tensor, "argument"),
    (seeds_the_generator, "seed"),
]


@pytest.mark.parametrize(("step", "word"), OUTSIDE, ids=lambda v: getattr(v, "__name__", ""))
def test_state_outside_the_arguments(step: Callable[..., Any], word: str) -> None:
    w = fresh(step)
    w.model.calls = 0
    assert word in str(refused(step, w))


def test_tensor_kept_by_the_step_is_refused() -> None:
    """A list that the step appends to would grow at capture only."""
    history.clear()
    assert "outside the model" in str(refused(appends_to_a_global, fresh()))
    history.clear()


def test_closed_over_counter() -> None:
    count = 0

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        loss = F.cross_entropy(model(x), y) / count  # HERE
        loss.backward()
        optimizer.step()
        return loss

    refused(step, fresh(step))


def test_scheduler_stepped_inside() -> None:
    w = fresh()
    scheduler = StepLR(w.optimizer, 1, gamma=0.5)
    before = dict(scheduler.state_dict())

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        scheduler.step()  # HERE
        return loss

    assert "scheduler" in str(refused(step, w))
    assert scheduler.state_dict() == before


def test_learning_rate_changed_inside() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5  # HERE
        return train_step(model, optimizer, x, y)

    refused(step, fresh(step))


def print_shape(module: nn.Module, args: Any, output: Tensor) -> None:
    print("shape", tuple(output.shape))  # HERE


def print_value(module: nn.Module, args: Any, output: Tensor) -> None:
    print(output.detach().mean())  # HERE


def print_gradient(gradient: Tensor) -> None:
    print(gradient.norm())  # HERE


@pytest.mark.parametrize("hook", [print_shape, print_value])
def test_forward_hook_that_prints(
    hook: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    w = fresh()
    w.model.head.register_forward_hook(hook)
    refused(train_step, w, lines_of=hook)
    assert capsys.readouterr().out == ""


def test_gradient_hook_that_prints(capsys: pytest.CaptureFixture[str]) -> None:
    w = fresh()
    w.model.head.weight.register_hook(print_gradient)
    refused(train_step, w, lines_of=print_gradient)
    assert capsys.readouterr().out == ""


def test_writing_a_file(tmp_path: Any) -> None:
    target = tmp_path / "loss.txt"

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        with target.open("a") as file:  # HERE
            file.write("step")
        return loss

    refused(step, fresh(step))
    assert not target.exists()


# Models that are wrapped already


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


# Optimizers and scalers


@pytest.mark.parametrize(
    "kind",
    [torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.LBFGS],
    ids=lambda kind: kind.__name__,
)
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


def test_optimizer_of_another_model() -> None:
    w = fresh()
    other = MLP()
    w.optimizers[0] = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert "optimizer" in str(refused(train_step, w))


def test_optimizer_over_a_parameter_outside_every_model() -> None:
    w = fresh()
    w.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert "param_groups[1]" in str(refused(train_step, w))


def test_enabled_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # HERE
        scaler.step(optimizer)  # HERE
        scaler.update()
        return loss

    before = scaler.state_dict()
    assert "GradScaler" in str(refused(step, fresh(step)))
    assert scaler.state_dict() == before


def test_enabled_grad_scaler_as_an_argument() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scaler: Any) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()  # HERE
        scaler.step(optimizer)  # HERE
        scaler.update()
        return loss

    before = scaler.state_dict()
    assert "GradScaler" in str(refused(step, fresh(step), scaler))
    assert scaler.state_dict() == before


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


def returns_an_object(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    return Result(train_step(model, optimizer, x, y))


class Result:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def returns_the_model(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    train_step(model, optimizer, x, y)
    return model


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
    (returns_an_object, "Result"),
    (returns_the_model, "MLP"),
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
        graphopt.compile(wrong_shapes, pipeline="none")(w.model, w.optimizer, *CASE.batch(0))
    snapshot.assert_unchanged()
    error = caught.value
    assert "zoo.py" in str(error)  # the line of the model that got the wrong shape
    assert isinstance(error.__cause__, RuntimeError)


def test_no_model_among_the_arguments() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return (x * y[:, None]).sum()

    assert "model" in str(refused(step, World(step, [], [])))


def test_model_on_another_device_than_the_batch() -> None:
    x, y = CASE.batch(0)
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
        if check and loss > 0:  # HERE
            return loss
        loss.backward()
        optimizer.step()
        return loss

    captured, eager = fresh(), fresh()
    compiled = graphopt.compile(step, pipeline="none")
    with pytest.raises(graphopt.CaptureError):
        compiled(captured.model, captured.optimizer, *CASE.batch(0), True)
    for i in range(3):
        expected = step(eager.model, eager.optimizer, *CASE.batch(i), False)
        actual = compiled(captured.model, captured.optimizer, *CASE.batch(i), False)
        assert torch.equal(actual, expected)


def test_an_error_leaves_a_cached_capture_working() -> None:
    captured, eager = fresh(), fresh()
    compiled = graphopt.compile(train_step, pipeline="none")
    x, y = CASE.batch(0)
    for batch in ((x, y), (x, y), (x[:, :5], y), (x, y)):
        if batch[0].shape[1] != 8:
            with pytest.raises(graphopt.CaptureError):
                compiled(captured.model, captured.optimizer, *batch)
            continue
        expected = train_step(eager.model, eager.optimizer, *batch)
        assert torch.equal(compiled(captured.model, captured.optimizer, *batch), expected)
