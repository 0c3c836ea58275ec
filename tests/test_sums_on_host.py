"""Numbers outside a step to which it adds what numpy computes of tensors."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import graphopt
from loops import Loop, graphs_of, trained


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, value: Any, n: int = 1) -> None:
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


def _accuracy(out: torch.Tensor, y: torch.Tensor) -> Any:
    predicted = numpy.argmax(out.detach().cpu().numpy(), axis=1)
    return numpy.sum(predicted == y.numpy()) / len(y)


def _state() -> SimpleNamespace:
    items = {"sum": 0.0, "n": 0}
    return SimpleNamespace(sum=0, n=0, best=0.0, kept=[], items=items, meter=Meter(), seen=[])


def _add(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.sum += _accuracy(out, y)


def _add_arrays(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.sum += loss.detach().cpu().numpy()
    s.n += 1
    if s.n % 2 == 0:
        print(f"{s.n} {s.sum / s.n:.4f}")
        s.sum = 0.0


def _add_twice(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.sum = s.sum + _accuracy(out, y)
    s.sum = s.sum + _accuracy(-out, y)
    s.kept.append(s.sum)


def _decide(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.sum += _accuracy(out, y)
    if s.sum > 1.2:
        print("much", s.sum)
        s.sum = 0


def _keep(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    before = s.sum
    s.sum += _accuracy(out, y)
    s.best = max(float(s.best), 0.1)
    s.kept.append((before, s.sum))
    s.items["last"] = s.sum


def _largest(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.sum = max(s.sum, loss.detach().numpy().mean())


def _items(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.items["sum"] += _accuracy(out, y)
    s.items["n"] += len(y)


def _meter(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    s.meter.update(_accuracy(out, y), len(y))
    print(f"{s.meter.val:.3f} ({s.meter.avg:.3f})")


def _show(s: Any, loss: torch.Tensor, out: torch.Tensor, y: torch.Tensor) -> None:
    graphopt.callback(lambda: s.seen.append(s.sum))
    s.sum += _accuracy(out, y)
    graphopt.callback(lambda: s.seen.append(s.sum))


STYLES = [_add, _add_arrays, _add_twice, _decide, _keep, _largest, _items, _meter, _show]
BETWEEN: list[Any] = [None, 0, 0.5, numpy.float64(2), numpy.float32(-1), numpy.int64(3)]


def _run(add: Any, compiled: bool, between: Any = None, calls: int = 7) -> Any:
    torch.manual_seed(0)
    model, s = nn.Linear(3, 2), _state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        add(s, loss, out, y)

    called = graphopt.compile(step) if compiled else step
    said = []
    for index in range(calls):
        called(torch.randn(4, 3), torch.randint(0, 2, (4,)))
        said.append(repr({key: value for key, value in vars(s).items() if key != "meter"}))
        said.append(repr(vars(s.meter)))
        if index == 3 and between is not None:
            s.sum = s.meter.sum = s.items["sum"] = copy.deepcopy(between)
    graphs = len(called.captures) if isinstance(called, graphopt.TrainStep) else 0
    return [said, model.weight.tolist()], graphs


@pytest.mark.parametrize("between", BETWEEN, ids=repr)
@pytest.mark.parametrize("add", STYLES)
def test_sums(add: Any, between: Any, capsys: pytest.CaptureFixture[str]) -> None:
    eager = _run(add, False, between)[0], capsys.readouterr().out
    compiled, graphs = _run(add, True, between)
    assert eager == (compiled, capsys.readouterr().out)
    assert graphs <= 3


@pytest.mark.parametrize("between", [numpy.ones(2), numpy.array(1.0), torch.ones(()), True])
def test_what_is_no_number_in_a_later_call(between: Any) -> None:
    eager = _run(_add, False, between)[0]
    with contextlib.suppress(graphopt.CaptureError):  # which says why
        assert eager == _run(_add, True, between)[0]


def test_an_array_that_others_hold() -> None:
    """What the step adds to in place in eager code."""

    def run(compiled: bool) -> Any:
        shared = numpy.zeros(2)
        s = SimpleNamespace(sum=0)
        model = nn.Linear(3, 2)

        def step(x: torch.Tensor) -> None:
            s.sum += model(x).detach().numpy().sum(axis=0)

        called = graphopt.compile(step) if compiled else step
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.5)
        called(torch.ones(2, 3))
        s.sum = shared
        called(torch.ones(2, 3))
        called(torch.ones(2, 3))
        return shared.tolist(), numpy.asarray(s.sum).tolist()

    eager = run(False)
    with contextlib.suppress(graphopt.CaptureError):
        assert eager == run(True)


KINDS: dict[str, Any] = {
    "integers": lambda s, number: s.sum + numpy.int64(-2),
    "an argument": lambda s, number: s.sum + numpy.int64(1) + number,
    "single precision": lambda s, number: numpy.float32(s.sum) + numpy.float32(0.1),
    "a remainder": lambda s, number: (s.sum + numpy.int32(5)) % numpy.int32(7),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_scalars_of_numpy_that_are_known(kind: str) -> None:
    def make() -> Loop:
        s, model = _state(), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: torch.Tensor) -> Any:
            trained(model, optimizer, x)
            for _ in range(2):
                s.sum = KINDS[kind](s, number)
                print(s.sum, type(s.sum).__name__, f"{s.sum / 3:.3f}")
            return s.sum

        return Loop(step, lambda: [model, s.sum])

    assert graphs_of(make, 5) <= 2


def test_a_sum_in_a_default_dictionary() -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, sums = nn.Linear(3, 2), defaultdict[str, Any](int)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            sums["accuracy"] += _accuracy(model(x), y)

        called = graphopt.compile(step) if compiled else step
        for _ in range(4):
            called(torch.randn(4, 3), torch.randint(0, 2, (4,)))
        return repr(dict(sums))

    assert run(False) == run(True)


def test_a_step_that_raises_changes_nothing() -> None:
    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, s, raised = nn.Linear(3, 2), SimpleNamespace(sum=0.0), []

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            accuracy = _accuracy(model(x), y)
            if accuracy == 1:
                raise AssertionError("all are right")
            s.sum += accuracy

        called = graphopt.compile(step) if compiled else step
        for _ in range(8):
            try:
                called(torch.randn(2, 3), torch.randint(0, 2, (2,)))
            except AssertionError as error:
                raised.append(str(error))
            raised.append(repr(s.sum))
        return raised

    assert run(False) == run(True)


def _run_anew(add: Any, compiled: bool) -> Any:
    """Every third call finds the numbers in an object made anew."""
    torch.manual_seed(0)
    model, found = nn.Linear(3, 2), SimpleNamespace(state=_state())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        add(found.state, loss, out, y)
        return loss

    called = graphopt.compile(step) if compiled else step
    said = []
    for index in range(8):
        if index % 3 == 2:
            found.state = _state()
        said.append(called(torch.randn(4, 3), torch.randint(0, 2, (4,))).item())
        shown = {key: value for key, value in vars(found.state).items() if key != "meter"}
        said.append(repr(shown))
        said.append(repr(vars(found.state.meter)))
    return said


@pytest.mark.parametrize("add", [_add, _decide, _keep, _items, _meter])
def test_each_call_adds_to_the_object_that_is_there(add: Any) -> None:
    assert _run_anew(add, True) == _run_anew(add, False)
