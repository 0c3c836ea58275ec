"""Meters and other objects that a program makes anew in each epoch, and hands to the step or keeps
where the step finds them: one graph for each state of theirs serves whichever object is there.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class AverageMeter:
    """That of torch's imagenet example."""

    def __init__(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Twice(AverageMeter):
    def update(self, val: Any, n: int = 1) -> None:
        super().update(val * 2, n)


class WithSlots:
    __slots__ = ("avg", "count", "sum", "val")

    def __init__(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    update = AverageMeter.update


@dataclass
class OfData:
    total: Any = 0
    count: int = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.total += val * n
        self.count += n


class SmoothedValue:
    def __init__(self) -> None:
        self.deque: deque[Any] = deque(maxlen=3)
        self.total: Any = 0.0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.deque.append(val)
        self.count += n
        self.total += val * n


class MetricLogger:
    """That of torchvision's references."""

    def __init__(self) -> None:
        self.meters: Any = defaultdict(SmoothedValue)

    def update(self, val: Any, n: int = 1) -> None:
        for name, value in {"loss": val, "more": val + n}.items():
            self.meters[name].update(value)


KINDS: list[type] = [AverageMeter, Twice, WithSlots, OfData, SmoothedValue, MetricLogger]


@dataclass
class Found:
    """Where a step finds meters."""

    first: Any
    second: Any
    model: nn.Module
    last: Any = None


Use = Callable[[Found, Any, Any], Any]


def given(found: Found, meter: Any, value: Any) -> None:
    meter.update(value, 2)


def in_attributes(found: Found, meter: Any, value: Any) -> None:
    found.first.update(value, 2)
    found.second.update(value * 3)


def in_both(found: Found, meter: Any, value: Any) -> Any:
    meter.update(value, 2)
    found.second.update(value)
    return meter.count if hasattr(meter, "count") else None


def of_the_model(found: Found, meter: Any, value: Any) -> None:
    meter.update(value, 2)
    found.model.meter.update(value * 5)


def keeps_it(found: Found, meter: Any, value: Any) -> None:
    meter.update(value, 2)
    found.last = meter


def compares(found: Found, meter: Any, value: Any) -> Any:
    meter.update(value, 2)
    return value * 2 if meter is found.second else value


def by_method(found: Found, meter: Any, value: Any) -> None:
    update = meter.update
    update(value)


USES: list[Use] = [given, in_attributes, in_both, of_the_model, keeps_it, compares, by_method]

Change = Callable[[Found, type, int], None]


def each_epoch(found: Found, kind: type, call: int) -> None:
    if call % 3 == 0:
        found.first, found.second = kind(), kind()


def sometimes_one(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call // 3 == 1:
        found.second = found.first


def in_the_middle(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call % 3 == 1:
        found.first = kind()


def copied(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call % 3 == 2:
        found.first = copy.deepcopy(found.first)


def exchanged(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call % 3:
        found.first, found.second = found.second, found.first


def that_of_the_model(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call % 3 == 2:
        found.first = found.model.meter


def of_another_class(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call == 6:
        found.first = Twice()


def with_another_method(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call % 3 == 1 and hasattr(found.first, "__dict__"):
        found.first.update = lambda value, n=1: None
    if call % 3 == 2:
        vars_of = getattr(found.first, "__dict__", {})
        vars_of.pop("update", None)


def with_an_attribute_less(found: Found, kind: type, call: int) -> None:
    each_epoch(found, kind, call)
    if call == 7 and isinstance(found.first, AverageMeter):
        del found.first.avg
        found.first.more = 1  # type: ignore[attr-defined]


CHANGES: list[Change] = [
    each_epoch,
    sometimes_one,
    in_the_middle,
    copied,
    exchanged,
    that_of_the_model,
    of_another_class,
    with_another_method,
    with_an_attribute_less,
]


def state(value: Any) -> Any:
    """All that is in a meter, as text."""
    if callable(value):
        return "a function"
    if isinstance(value, dict):
        return {name: state(each) for name, each in value.items()}
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", None)
    if names is None or isinstance(value, Tensor):
        return str(list(value) if isinstance(value, deque) else value)
    return {name: state(getattr(value, name)) for name in names}


def run(
    kind: type, use: Use, change: Change, tensors: bool, compiled: bool, calls: int = 9
) -> tuple[Any, int]:
    """What each call gives and leaves, in old meters as well, and how many graphs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.meter = kind()  # type: ignore[assignment]
    found = Found(None, None, model)

    def step(x: Tensor, meter: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return use(found, meter, loss.detach() if tensors else loss.item())

    used: Any = graphopt.compile(step) if compiled else step
    left: list[Any] = []
    meters = [model.meter]
    for call, x in enumerate(torch.randn(calls, 5, 4)):
        change(found, kind, call)
        meters += [found.first, found.second]
        left.append((str(used(x, found.first)), found.last is found.first))
        left.append([state(each) for each in meters])
    return left, len(used.captures) if compiled else 0


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("use", [given, in_attributes])
def test_meters_made_anew_take_one_graph_for_each_state(use: Use, tensors: bool) -> None:
    expected, _ = run(AverageMeter, use, each_epoch, tensors, False)
    found, captures = run(AverageMeter, use, each_epoch, tensors, True)
    assert found == expected
    assert captures == 2


@pytest.mark.parametrize("kind", [WithSlots, MetricLogger])
def test_meters_of_other_kinds_take_few_graphs(kind: type) -> None:
    expected, _ = run(kind, given, each_epoch, False, False)
    found, captures = run(kind, given, each_epoch, False, True)
    assert found == expected
    assert captures <= 2


@pytest.mark.parametrize(
    ("use", "change"),
    [(in_both, sometimes_one), (of_the_model, that_of_the_model), (given, with_another_method)],
)
def test_each_call_changes_the_meters_that_are_there(use: Use, change: Change) -> None:
    expected, _ = run(AverageMeter, use, change, False, False)
    found, _ = run(AverageMeter, use, change, False, True)
    assert found == expected


@pytest.mark.full
@pytest.mark.covering(2)
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_meters_of_all_kinds(kind: type, use: Use, change: Change, tensors: bool) -> None:
    expected, _ = run(kind, use, change, tensors, False)
    found, _ = run(kind, use, change, tensors, True)
    assert found == expected


@pytest.mark.parametrize("place", ["variable", "attribute"])
def test_a_sum_that_begins_with_a_number_takes_two_graphs(place: str) -> None:
    model = nn.Linear(4, 4)
    kept, total = SimpleNamespace(total=0), 0

    @graphopt.compile
    def step(x: Tensor) -> None:
        nonlocal total
        loss = model(x).square().mean().detach()
        if place == "variable":
            total += loss
        else:
            kept.total += loss

    for _ in range(4):
        kept.total = total = 0
        expected: Any = 0
        for x in torch.randn(3, 5, 4):
            step(x)
            expected += model(x).square().mean().detach()
        assert torch.equal(torch.as_tensor(total if place == "variable" else kept.total), expected)
    assert len(step.captures) == 2


def test_an_object_that_is_a_key_is_that_very_one() -> None:
    model, keys = nn.Linear(4, 4), [AverageMeter(), AverageMeter()]
    kept, rates = SimpleNamespace(key=keys[0]), dict(zip(keys, (1.0, 2.0), strict=True))

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        return model(x).sum() * rates[kept.key]

    x = torch.ones(2, 4)
    for key, rate in rates.items():
        kept.key = key
        assert torch.equal(step(x), model(x).sum() * rate)


def with_a_logger_in_each_epoch(compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    logger: Any = None

    def step(x: Tensor, epoch: int) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if epoch < 1:
            for parameter in model[1].parameters():
                parameter.grad = None
        optimizer.step()
        logger.update(loss.item())
        return loss

    used: Any = graphopt.compile(step) if compiled else step
    seen: list[Any] = []
    for epoch in range(3):
        logger = MetricLogger()
        logger.itself = logger  # only the collector lets go of it
        for x in torch.randn(3, 5, 4):
            seen.append(used(x, epoch).item())
            seen += [(m.total, m.count, list(m.deque)) for m in logger.meters.values()]
    return [*seen, model[1].weight.tolist()]


def test_the_step_may_make_meters_in_a_logger_made_anew() -> None:
    """Optimizer state of a layer that is frozen in the first epoch is made in the second one."""
    found = with_a_logger_in_each_epoch(compiled=True)
    assert found == with_a_logger_in_each_epoch(compiled=False)
