"""Modes of torch, hooks on saved tensors and the search for anomalies around the call of a step,
and functions of torch that a program has replaced: never a graph that takes no notice of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.errors import CaptureError

Around = Callable[[], AbstractContextManager[Any]]


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.relu else result


class DoublingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.relu.default else result


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountingOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def doubling_saved() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved * 2 if saved.is_floating_point() else saved
    )


def counting_flops() -> AbstractContextManager[Any]:
    return FlopCounterMode(display=False)


CHANGING: list[Around] = [Doubling, DoublingOperators, doubling_saved]
"""What changes the numbers of a step."""

SEEING: list[Around] = [Counting, CountingOperators, counting_flops, torch.autograd.detect_anomaly]
"""What sees what is called."""

HARMLESS: list[Around] = [
    torch.autograd.graph.save_on_cpu,
    lambda: torch.device("cpu"),
    lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
]


@contextmanager
def relu_replaced() -> Iterator[None]:
    before = F.relu
    F.relu = lambda x, inplace=False: before(x) * 2
    try:
        yield
    finally:
        F.relu = before


@contextmanager
def backward_replaced() -> Iterator[None]:
    before = Tensor.backward
    Tensor.backward = lambda self, *args: before(self * 2, *args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = before  # type: ignore[method-assign]


REPLACED: list[Around] = [relu_replaced, backward_replaced]


class Training:
    def __init__(self, inside: Around = nullcontext) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inside = inside

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.inside():
            loss = F.relu(self.model(x)).square().mean()
            loss.backward()
        self.optimizer.step()
        return loss.detach()


def losses_of(step: Callable[[Tensor], Tensor], around: Around, pattern: list[bool]) -> list[float]:
    losses = []
    for number, on in enumerate(pattern):
        with around() if on else nullcontext():
            losses.append(step(torch.linspace(-1, number + 1.0, 12).reshape(3, 4)).item())
    return losses


def name_of(around: Any) -> str:
    return getattr(around, "__name__", type(around).__name__)


PATTERNS = [[True, True], [False, False, True, False, True]]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("pattern", PATTERNS, ids=["first", "later"])
@pytest.mark.parametrize("around", [*CHANGING, *SEEING], ids=name_of)
def test_around_a_call_is_refused(around: Around, pattern: list[bool]) -> None:
    training = Training()
    step = graphopt.compile(training.step)
    first = pattern.index(True)
    losses = losses_of(step, nullcontext, [False] * first)
    state = [p.detach().clone() for p in training.model.parameters()]
    with pytest.raises(CaptureError) as raised, around():
        step(torch.ones(3, 4))
    assert raised.value.hint is not None
    assert all(map(torch.equal, state, training.model.parameters()))
    assert losses == losses_of(Training().step, nullcontext, [False] * first)
    step(torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("pattern", PATTERNS, ids=["first", "later"])
@pytest.mark.parametrize("around", [*HARMLESS, *REPLACED], ids=name_of)
def test_around_a_call_as_eager(around: Around, pattern: list[bool]) -> None:
    eager = losses_of(Training().step, around, pattern)
    assert losses_of(graphopt.compile(Training().step), around, pattern) == eager


@pytest.mark.parametrize("inside", [*CHANGING, *REPLACED, counting_flops], ids=name_of)
def test_within_a_step_as_eager(inside: Around) -> None:
    eager = losses_of(Training(inside).step, nullcontext, [False] * 3)
    assert losses_of(graphopt.compile(Training(inside).step), nullcontext, [False] * 3) == eager


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_within_a_step_are_refused() -> None:
    with pytest.raises(CaptureError, match="anomalies"):
        graphopt.compile(Training(torch.autograd.detect_anomaly).step)(torch.ones(3, 4))


@pytest.mark.parametrize("mode", [Counting(), CountingOperators()], ids=name_of)
def test_what_a_mode_changes_is_refused(mode: Any) -> None:
    """It would see what the trace calls, which is more, and not what a call does."""
    with pytest.raises(CaptureError, match="calls"):
        graphopt.compile(Training(lambda: mode).step)(torch.ones(3, 4))
