"""Modes of torch, hooks on saved tensors and the search for anomalies around the call of a step,
and functions of torch that a program has replaced: never a graph that takes no notice of them.

What sees operators sees those of the graph; what sees functions of torch sees an eager call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import graphopt
from gloo import Pool, pool
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
    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class KeepingOperators(TorchDispatchMode):
    """Notes the memory of what operators give, as trackers of memory do."""

    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self.live: WeakSet[torch.UntypedStorage] = WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.live.add(each.untyped_storage())
        self.peak = max(self.peak, sum(each.nbytes() for each in self.live))
        return result


def doubling_saved() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved * 2 if saved.is_floating_point() else saved
    )


class Unsure(TorchDispatchMode):
    """Changes nothing, which its class does not say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def counting_flops() -> AbstractContextManager[Any]:
    return FlopCounterMode(display=False)


CHANGING: list[Around] = [Doubling, DoublingOperators, doubling_saved]
"""What changes the numbers of a step."""

WATCHING: list[Around] = [
    *(Doubling, doubling_saved, Counting, Unsure),
    torch.autograd.detect_anomaly,
]
"""What has to see the functions of a step themselves."""

HARMLESS: list[Around] = [
    torch.autograd.graph.save_on_cpu,
    lambda: torch.device("cpu"),
    *(CountingOperators, counting_flops, ModuleTracker, KeepingOperators),
    torch.profiler.profile,
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
@pytest.mark.parametrize("around", WATCHING, ids=name_of)
def test_a_call_whose_functions_are_watched_runs_eagerly(
    around: Around, pattern: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    step = graphopt.compile(Training().step)
    assert losses_of(step, around, pattern) == losses_of(Training().step, around, pattern)
    assert caplog.text.count("runs eagerly where it is called with") == 1
    assert len(step.captures) == (0 if all(pattern) else 1)


class Overflowing(Training):
    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) * 0).sqrt().sum()
        loss.backward()
        return loss


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
def test_an_anomaly_is_found_as_in_eager_code() -> None:
    step = graphopt.compile(Overflowing().step)
    step(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match=r"returned nan values"), torch.autograd.detect_anomaly():
        step(torch.ones(3, 4))


@pytest.mark.parametrize("around", [counting_flops, CountingOperators], ids=name_of)
@pytest.mark.parametrize("pattern", PATTERNS, ids=["first", "later"])
def test_the_operators_of_a_graph_are_counted(
    around: Callable[[], Any], pattern: list[bool]
) -> None:
    """And none of its capture, whose graph all calls share."""

    def counts(step: Callable[[Tensor], Tensor]) -> list[Any]:
        found = []
        for on in pattern:
            with around() if on else nullcontext() as mode:
                step(torch.ones(3, 4))
            if isinstance(mode, FlopCounterMode):
                found.append(mode.get_total_flops())
            elif mode is not None:
                calls = Counter(call.replace("_.", ".") for call in mode.calls)
                found.append([calls[f"aten.{name}.default"] for name in ("mm", "addmm", "relu")])
        return found

    step = graphopt.compile(Training().step)
    step(torch.ones(3, 4))
    assert counts(step) == counts(Training().step)
    assert len(step.captures) == 1


class DoublingInPlace(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.mul_(2) if func is torch.ops.aten.relu.default else result


class DoublingArguments(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.relu.default:
            args = (args[0] * 2,)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [DoublingOperators, DoublingInPlace, DoublingArguments])
def test_operators_that_a_mode_changes(around: Around, caplog: pytest.LogCaptureFixture) -> None:
    """As in eager code, in each call: a graph may have other operators than the step."""
    step, pattern = graphopt.compile(Training().step), [False, True, True, True]
    assert losses_of(step, around, pattern) == losses_of(Training().step, around, pattern)
    assert "may change what operators give" in caplog.text


@pytest.mark.parametrize("watching", [Counting, doubling_saved], ids=name_of)
def test_what_watches_a_capture_alone_is_refused(watching: Around) -> None:
    training = Training()
    with pytest.raises(CaptureError, match="it is called with") as raised, watching():
        graphopt.capture(training.step, torch.ones(3, 4))
    assert raised.value.hint is not None


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


def searching_anomalies() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autograd.detect_anomaly()


def counted_on(rank: int, ranks: list[int], kind: str) -> tuple[list[Any], list[Tensor], int]:
    """Calls of a step, with a mode around all but the first on some ranks.

    Returns:
        What the mode has counted in each, or the text of an error; parameters; graphs.
    """
    kinds: dict[str, Around] = {
        "counting": CountingOperators,
        "flops": counting_flops,
        "keeping": KeepingOperators,
        "doubling": DoublingOperators,
        "functions": Counting,
        "saved tensors": doubling_saved,
        "anomalies": searching_anomalies,
    }
    training, found = Training(), list[Any]()
    step = graphopt.compile(training.step)
    for number in range(4):
        on = rank in ranks and number > 0
        with kinds[kind]() if on else nullcontext() as mode:
            try:
                step(torch.linspace(-1, number + 1.0, 12).reshape(3, 4) + rank)
            except graphopt.GraphOptError as error:
                return [str(error)], [], 0
        found.append(len(mode.calls) if isinstance(mode, CountingOperators) else 0)
    step.flush()
    weights = [parameter.detach() for parameter in training.model.parameters()]
    return found, weights, len(step.captures)


@pytest.mark.parametrize("kind", ["counting", "flops", "keeping"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_a_rank_of_several_is_watched_alone(two_ranks: Pool, kind: str, ranks: list[int]) -> None:
    """The same graph runs on all ranks, with the mode or without it."""
    expected = two_ranks.run(counted_on, [], kind)
    for rank, (found, weights, graphs) in enumerate(two_ranks.run(counted_on, ranks, kind)):
        assert graphs == 1
        assert all(map(torch.equal, weights, expected[rank][1]))
        if kind == "counting":
            assert (min(found[1:]) > 10) == (rank in ranks), found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("doubling", "only_looks = True"),
        ("functions", "enter it within the step, whose graph then has what it does; or let"),
        ("saved tensors", "enter it within the step, whose graph then has what it does; or let"),
        ("anomalies", "give check_nan=False, with which the graph runs; or let all ranks run"),
    ],
)
def test_what_a_rank_cannot_run_eagerly_is_refused_on_several(kind: str, said: str) -> None:
    with pool(2) as ranks:
        for found, _, _ in ranks.run(counted_on, [0, 1], kind):
            assert said in str(found[0])
