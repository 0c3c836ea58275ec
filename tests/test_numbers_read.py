"""Numbers that a step reads from tensors: rounded, compared, chosen, put elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable
from math import ceil, exp, floor, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

Kept = list[Any]


Effect = Callable[[Tensor, Tensor, Kept], Any]


def run(effect: Effect, compiled: bool, broken: int | None = None) -> tuple[list[Any], Kept, int]:
    """Six calls: what each returns or raises and leaves of a weight, what is kept, and the graphs.

    Args:
        broken: the call in which an input is 0, and another is no number.
    """
    torch.manual_seed(0)
    model, all_kept = nn.Linear(4, 4), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        kept: Kept = []
        loss = model(x).pow(2).mean()
        factor = effect(loss, x, kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss if factor is None else loss * factor, tuple(kept)

    used: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for call in range(6):
        x = torch.randn(3, 4)
        if call == broken:
            x[0, 0], x[0, 1] = 0.0, math.nan
        try:
            loss, kept = used(x)
            found.append(loss.item())
            all_kept.extend(kept)
        except (ValueError, OverflowError, ZeroDivisionError) as error:
            found.append((type(error), str(error)))
        found.append(model.weight.detach().tolist())
    return found, [(type(each), each) for each in all_kept], len(used.captures) if compiled else 0


KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "int of a tensor": lambda loss, x: int(loss.detach() * 100),
    "int of a number": lambda loss, x: int(loss.item() * 100),
    "negative": lambda loss, x: int(-loss.detach() * 100),
    "beyond 64 bits": lambda loss, x: int(loss.detach() * 1e30),
    "half precision": lambda loss, x: int(loss.detach().half() * 100),
    "in arithmetic": lambda loss, x: int(loss.detach() * 100) % 7 + (int(loss.item() * 99) // 3),
    "divided": lambda loss, x: int(loss.detach() * 100) / 3,
    "shifted": lambda loss, x: int(loss.detach() * 100) << 1,
    "twice": lambda loss, x: int(loss.item() * 10),
    "a float again": lambda loss, x: float(int(loss.item() * 10)),
    "floor": lambda loss, x: math.floor(loss.item() * 100),
    "floor by name": lambda loss, x: floor(loss.detach() * 100),
    "ceil of a tensor": lambda loss, x: ceil(loss.detach() * 100),
    "trunc": lambda loss, x: math.trunc(loss.item() * 100),
    "is an integer": lambda loss, x: isinstance(math.floor(loss.item() * 100), int),
    "rounded is an integer": lambda loss, x: isinstance(round(loss.item() * 100), int),
    "digits are a float": lambda loss, x: isinstance(round(loss.item() * 100, 1), int),
    "rounded": lambda loss, x: round(loss.item() * 100),
    "rounded, None": lambda loss, x: round(loss.item() * 100, None),
    "rounded to even": lambda loss, x: round(round(loss.item()) + 0.5),
    "digits": lambda loss, x: round(loss.item(), 2),
    "no digits": lambda loss, x: round(loss.item() * 1234, 0),
    "tens": lambda loss, x: round(loss.item() * 1234, -2),
    "exp of a tensor": lambda loss, x: math.exp(loss.detach()),
    "exp by name": lambda loss, x: exp(loss.detach()),
    "of an integer tensor": lambda loss, x: math.sqrt((x > 0).sum()),
    "pow": lambda loss, x: math.pow(loss.detach(), 2),
    "truth": lambda loss, x: int((loss.detach() > 0.3).item()),
    "truth of numbers": lambda loss, x: int(loss.item() > 0.3),
    "truth as a float": lambda loss, x: float(loss.item() > 0.3),
    "truths counted": lambda loss, x: sum([loss.item() > 0.3, (x.mean() > 0).item()]),
    "truth added": lambda loss, x: 1 + (loss.item() > 0.3) * 3 - (x.mean() > 0).item(),
    "truth negated": lambda loss, x: -(loss.item() > 0.3),
    "root of a count": lambda loss, x: math.sqrt(int((x > 0).sum())),
    "quotient and rest": lambda loss, x: divmod(int((x > 0).sum()), 3),
    "power": lambda loss, x: 2 ** int((x > 0).sum()),
}


def test_what_is_made_of_numbers_takes_one_graph_together() -> None:
    def effect(loss: Tensor, x: Tensor, kept: Kept) -> Any:
        for make in KEPT.values():
            kept.append(make(loss, x))
        return sum(compute(loss, x, kept) for compute in COMPUTED.values())

    expected, found = run(effect, False), run(effect, True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


@pytest.mark.full
@pytest.mark.parametrize("name", KEPT)
def test_what_is_made_of_a_number_takes_one_graph(name: str) -> None:
    def effect(loss: Tensor, x: Tensor, kept: Kept) -> None:
        kept.append(KEPT[name](loss, x))

    expected, found = run(effect, False), run(effect, True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


COMPUTED: dict[str, Effect] = {
    "factor": lambda loss, x, kept: int(loss.detach() * 100),
    "tensor of it": lambda loss, x, kept: torch.tensor(int(loss.item() * 100)).float(),
    "clamped": lambda loss, x, kept: torch.clamp(x, max=int(loss.detach() * 10)).sum(),
    "compared": lambda loss, x, kept: (x.long() == int(loss.detach() * 10)).sum(),
    "filled": lambda loss, x, kept: x.clone().fill_(int(loss.detach() * 10)).sum(),
    "in a list": lambda loss, x, kept: torch.tensor([int((x > 0).sum()), 0.5]).sum(),
    "chosen": lambda loss, x, kept: torch.where(x > 0, int((x > 0).sum()), 0).sum(),
    "divided": lambda loss, x, kept: (x.long() * 100 // (1 + int((x > 0).sum()))).sum(),
    "of 8 bits": lambda loss, x, kept: (x.to(torch.int8) * int((x > 0).sum())).sum(),
    "by a truth": lambda loss, x, kept: (loss.item() > 0.3) * x.sum(),
    "place": lambda loss, x, kept: x[min(0, int(loss.detach() * 2)), 0],
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMPUTED)
def test_a_tensor_made_of_it_takes_one_graph(name: str) -> None:
    expected, found = run(COMPUTED[name], False), run(COMPUTED[name], True)
    assert found[:2] == expected[:2]
    assert found[2] == 1


DECIDING: dict[str, Effect] = {
    "range": lambda loss, x, kept: sum(map(float, range(int(loss.detach() * 4)))),
    "range of floor": lambda loss, x, kept: sum(map(float, range(math.floor(loss.item() * 4)))),
    "item": lambda loss, x, kept: [1.0, 2.0, 3.0, 4.0][round(loss.item() * 2)],
    "key": lambda loss, x, kept: kept.append(
        {0: "low", 1: "high"}.get(int(loss.item() * 4), "top")
    ),
    "key of a truth": lambda loss, x, kept: {True: 2.0, False: 3.0}[(loss > 0.3).item()],
    "member": lambda loss, x, kept: kept.append(int(loss.item() * 4) in {0, 2}),
    "truths alike": lambda loss, x, kept: (loss > 0.3).item() == (x.mean() > 0).item(),
    "truths apart": lambda loss, x, kept: (loss > 0.3).item() != (x.mean() > 0).item(),
    "truth and a constant": lambda loss, x, kept: kept.append((loss > 0.3).item() == True),  # noqa: E712
    "test of a tensor": lambda loss, x, kept: 1.0 if math.isfinite(loss.detach()) else 0.0,
    "test by name": lambda loss, x, kept: 1.0 if isnan(loss.detach()) else 2.0,
    "whole": lambda loss, x, kept: 2.0 if round(loss.item(), 1).is_integer() else 3.0,
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_by_it_is_eagers(name: str) -> None:
    expected, found = run(DECIDING[name], False), run(DECIDING[name], True)
    assert found[:2] == expected[:2]
    assert found[2] <= 4


RAISING: dict[str, Effect] = {
    "no number": lambda loss, x, kept: int(x[0, 1].item()),
    "no number in a tensor": lambda loss, x, kept: int(x[0, 1]),
    "infinite": lambda loss, x, kept: round((1 / x[0, 0]).item()),
    "floor": lambda loss, x, kept: math.floor(1 / x[0, 0]),
    "zero": lambda loss, x, kept: int(loss.item() / x[0, 0].item()),
    "logarithm": lambda loss, x, kept: round(math.log(abs(x[0, 0])), 2),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_python_refuses_is_raised_before_the_update(name: str) -> None:
    expected, found = run(RAISING[name], False, broken=3), run(RAISING[name], True, broken=3)
    assert isinstance(expected[0][6], tuple)
    assert str(found[:2]) == str(expected[:2])


CASES: dict[str, Callable[[list[float]], Any]] = {
    "of a list": max,
    "of a tuple": lambda v: min(tuple(v)),
    "of a queue": lambda v: max(deque(v, maxlen=3)),
    "of a generator": lambda v: max(x for x in v),
    "of squares": lambda v: min(map(abs, v)),
    "of a dictionary": lambda v: max({"a": v[0], "b": v[1], "c": 0.5}.values()),
    "of arguments": lambda v: max(v[0], v[1], 0.5),
    "or else": lambda v: max(v, default=0.0),
    "of a set of constants": lambda v: max({0.5, 0.25}) + max(v),
}


def trained(read: Callable[[list[float]], Any], captured: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batches: list[Tensor]) -> Any:
        values = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return read(values)

    compiled = graphopt.compile(step, pipeline="none")
    run: Callable[..., Any] = compiled if captured else step
    found = [run([torch.randn(8, 6) for _ in range(4)]) for _ in range(12)]
    return [found, *(p.tolist() for p in model.parameters())], len(compiled.captures)


@pytest.mark.parametrize("read", CASES.values(), ids=CASES)
def test_one_graph(read: Callable[[list[float]], Any]) -> None:
    found, graphs = trained(read, True)
    expected, _ = trained(read, False)
    assert repr(found) == repr(expected)  # -0.0 and 0.0 are equal
    assert graphs == 1


INFINITE = float("inf")


SKIPS: dict[str, Callable[[float], Any]] = {
    "other than itself": lambda v: v != v,
    "not equal to itself": lambda v: not operator.eq(v, v),
    "not as large as itself": lambda v: not v >= v,
    "not as small as itself": lambda v: not v <= v,
    "a size below zero": lambda v: not abs(v) >= 0,
    "a square below zero": lambda v: not v * v >= 0,
    "not below infinity": lambda v: not v < INFINITE,
    "infinity": lambda v: v == INFINITE,
    "above the least infinity": lambda v: not v > -INFINITE,
    "in a tuple": lambda v: v in (INFINITE, 7.0),
    "equal to NaN": lambda v: v == math.nan,
    "a difference": lambda v: v - v != 0,
    "chained": lambda v: not -INFINITE < v < 1e30,
    "true at all": lambda v: not v,
    "math.isfinite": lambda v: not math.isfinite(v),
    "math.isnan": lambda v: math.isnan(v),
    "math.isinf": lambda v: math.isinf(v),
    "numpy.isfinite": lambda v: not np.isfinite(v),
    "numpy.isnan": lambda v: np.isnan(v),
    "numpy.isinf": lambda v: np.isinf(v),
    "the larger one": lambda v: max(v, 0.0) != v,
}


VALUES = (1.0, 2.0, math.nan, INFINITE, -INFINITE, 3.0, 0.0, 7.0, INFINITE, math.nan, 1.0)


def _left(skips: Callable[[float], Any], compiled: bool) -> list[str]:
    """What is left of a training that skips a step by the value of a number."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, shown: Tensor) -> Tensor | None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if skips(shown.item()):
            return None
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for number, value in enumerate(VALUES):
        x = torch.full((2, 3), 1.0 + number)
        found.append(repr((run(x, torch.tensor(value)), [p.tolist() for p in model.parameters()])))
    return found


@pytest.mark.parametrize("kind", SKIPS)
def test_every_call_is_eager_s(kind: str) -> None:
    assert _left(SKIPS[kind], compiled=True) == _left(SKIPS[kind], compiled=False)


def _by_setting(rate: float) -> bool:
    return math.isfinite(rate) and not math.isnan(rate)


def test_settings_are_known_before_a_call() -> None:
    """What is asked about a number among the arguments is a condition of the graph."""
    model = nn.Linear(3, 1)

    def step(x: Tensor, factor: float) -> Tensor:
        return model(x) * (factor if _by_setting(factor) else 0.0)

    run = graphopt.compile(step)
    for factor, captures in ((1.0, 1), (2.0, 1), (INFINITE, 2), (3.0, 2), (math.nan, 2)):
        x = torch.ones(2, 3)
        assert torch.equal(run(x, factor), step(x, factor).detach())
        assert len(run.captures) == captures


DRAWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "uniform": lambda x, bound: torch.zeros_like(x).uniform_(-bound.item(), bound.item()),
    "of a part": lambda x, bound: torch.zeros_like(x)[:, 0].uniform_(
        -bound[0].item(), bound.item()
    ),
    "normal": lambda x, bound: torch.empty_like(x).normal_(0, std=bound.item() / 2),
    "exponential": lambda x, bound: torch.empty_like(x).exponential_(bound.item()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_it_is_as_in_eager_code(draw: Callable[[Tensor, Tensor], Any]) -> None:
    """As fast adversarial training begins. A graph holds for the bounds that it met."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        bounds = [torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([2.0])]

        def step(x: Tensor, bound: Tensor, model: nn.Module = model) -> Tensor:
            noise = draw(x, bound)
            loss = model(x + (noise if noise.ndim == 2 else noise[:, None])).square().sum()
            loss.backward()
            return loss

        used: Any = graphopt.compile(step) if compiled else step
        losses = [used(torch.randn(3, 4), bound).item() for bound in (*bounds, *bounds)]
        gradients = [p.grad for p in model.parameters()]
        found.append([losses, [g.tolist() for g in gradients if g is not None], torch.rand(1)])
    assert found[0] == found[1]
    assert len(used.captures) <= 4


SOURCES = {
    "attribute": ("k.n", "k.n += 1"),
    "item of a list": ("k.l[0]", "k.l[0] += 1"),
    "item of a dictionary": ("k.d['a']", "k.d['a'] += 1"),
    "the first of two": ("k.d['b'] * k.d['a']", "k.d['b'] += 1"),
    "the second of two": ("k.d['a'] * k.d['b']", "k.d['b'] += 1"),
    "two kinds": ("k.n * k.l[0]", "k.n += 1"),
    "attribute of another": ("k.other.n", "k.other.n += 1"),
}


SINKS = {
    "item of a tensor": ["v = torch.zeros(2)", "v[1] = {} * 3", "w = v.sum()"],
    "own dictionary": ["t = {{}}", "t['x'] = {} * 2", "w = t['x']"],
    "own list": ["t = [0.0]", "t[0] = {} * 2", "w = t[0]"],
    "own object": ["t = K()", "t.n = {} * 2", "w = t.n"],
    "item of what is in an own list": ["t = [{{}}]", "t[0]['a'] = {} * 2", "w = t[0]['a']"],
    "added to an own one": ["t = {{'a': 1.0}}", "t['a'] += {} * 1", "w = t['a']"],
    "another attribute": ["k.z = {} * 2", "w = k.z"],
    "an attribute of the same name": ["k.third.n = {} * 2", "w = k.third.n"],
    "another item": ["k.d['c'] = {} * 0.5", "w = k.d['c']"],
    "an attribute that counts": ["k.n = k.n * 0.5 + {} * 0.1", "w = k.n"],
    "an item that counts": ["k.d['a'] = k.d['a'] * 0.5 + {} * 0.1", "w = k.d['a']"],
    "added in place": ["k.l[0] += {} * 0.1", "w = k.l[0]"],
    "exchanged": ["k.n, k.q = k.q * 0.5 + {} * 0.1, k.n * 0.5", "w = k.n - k.q"],
    "two that count": ["k.n, k.q = k.n * 0.5, k.q + {} * 0.1", "w = k.n - k.q"],
    "written on its way": ["k.third.n = k.n * half(k) + {} * 0.1", "w = k.third.n + k.n"],
}


PROGRAM = """
import torch

class K:
    pass

def half(k):
    k.n = k.n * 0.5
    return 0.5

def build():
    k = K()
    k.other, k.third = K(), K()
    k.n, k.q, k.l, k.d = 1.0, 3.0, [1.0, 2.0], {{"a": 1.0, "b": 2.0, "c": 0.0}}
    k.z, k.other.n, k.third.n = 0.0, 1.5, 0.0
    k.model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(k.model.weight, 0.3)
    torch.nn.init.zeros_(k.model.bias)
    k.optimizer = torch.optim.SGD(k.model.parameters(), lr=0.1)
    return k

def stepping(k, model, optimizer):
    def step(x):
        {}
        loss = (model(x) * w).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step

def change(k):
    {}
"""


def trained_as_stepped(program: Any, *, compiled: bool) -> list[Any]:
    k = program.build()
    step = program.stepping(k, k.model, k.optimizer)
    if compiled:
        step = graphopt.compile(step)
    results: list[Any] = []
    for call in range(6):
        results.append(step(torch.full((2, 3), 0.1 * (call + 1))).item())
        results.append((k.n, k.q, list(k.l), dict(k.d), k.z, k.other.n, k.third.n))
        if call % 2:
            program.change(k)
    return [*results, k.model.weight.tolist(), k.model.bias.tolist()]


@pytest.mark.parametrize(("source", "sink"), [*itertools.product(SOURCES, SINKS)])
def test_where_a_number_goes(source: str, sink: str, tmp_path: Path) -> None:
    value, change = SOURCES[source]
    lines = "\n        ".join(line.format(value) for line in SINKS[sink])
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(lines, change))
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert trained_as_stepped(program, compiled=True) == trained_as_stepped(program, compiled=False)
