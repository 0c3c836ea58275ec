"""Autocast around the calls of a step: equal to eager code bit for bit, or refused with a cure that
works, however the step reaches its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

BATCHES = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(3)]
Call = Callable[[Tensor, Tensor], Tensor]
Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


class Model(nn.Module):
    """With a layer that is used twice, so that a cast is shared, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(self.inner(self.inner(x).relu())))
        return logits


def update(optimizer: Optimizer, loss: Tensor) -> Tensor:
    loss.float().backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return update(optimizer, F.cross_entropy(model(x), y))


# Ways in which a step reaches what it works on.


def by_arguments(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    return partial(compiled(train), model, optimizer)


def by_closure(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    return compiled(lambda x, y: train(model, optimizer, x, y))


def by_partial(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    return compiled(partial(train, model, optimizer))


def by_self(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    @dataclass
    class Trainer:
        model: Model
        optimizer: Optimizer

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            return train(self.model, self.optimizer, x, y)

    return compiled(Trainer(model, optimizer).step)


def by_global(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    found = {**globals(), "the_model": model, "the_optimizer": optimizer}
    exec("def step(x, y): return train(the_model, the_optimizer, x, y)", found)
    return compiled(found["step"])


def by_optimizer(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    return partial(compiled(lambda o, x, y: train(model, o, x, y)), optimizer)


def by_weights(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    inner, last = model.inner.weight, model.last.weight

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(optimizer, F.cross_entropy(F.linear(F.linear(x, inner), last), y))

    return compiled(step)


def by_functional_call(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    def step(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (x,))
        return update(optimizer, F.cross_entropy(logits, y))

    return partial(compiled(step), dict(model.named_parameters()))


def with_a_region(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        return update(optimizer, loss)

    return compiled(step)


def with_a_decorator(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    @torch.autocast("cpu", torch.bfloat16)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x, y)

    return compiled(step)


def with_a_region_that_keeps(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            loss = F.cross_entropy(model(x), y)
        return update(optimizer, loss)

    return compiled(step)


def in_evaluation(compiled: Compile, model: Model, optimizer: Optimizer) -> Call:
    """Which the loop trains in between."""

    @compiled
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    def call(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        train(model, optimizer, x, y)
        return loss

    return call


WAYS = (
    *(by_arguments, by_closure, by_partial, by_self, by_global, by_optimizer, by_weights),
    *(by_functional_call, with_a_region, with_a_decorator, with_a_region_that_keeps),
    in_evaluation,
)


# Regions around a loop.


@dataclass(frozen=True)
class Region:
    """A region around a loop, or around each call, and eager code in it."""

    enter: tuple[Callable[[], Any], ...]
    each: bool = False
    evaluated: bool = False
    trained: bool = False
    keeps: bool = True


@contextmanager
def switched_on() -> Iterator[None]:
    torch.set_autocast_enabled("cpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


half = partial(torch.autocast, "cpu", torch.bfloat16)
short = partial(torch.autocast, "cpu", torch.float16)
uncached = partial(half, cache_enabled=False)
off = partial(torch.autocast, "cpu", enabled=False)

REGIONS = {
    "none": Region((), keeps=False),
    "loop": Region((half,)),
    "float16": Region((short,)),
    "each": Region((half,), each=True),
    "nested": Region((half, half)),
    "off within": Region((half, off), keeps=False),
    "on within": Region((off, half)),
    "uncached within": Region((half, uncached), keeps=False),
    "cached within": Region((uncached, partial(half, cache_enabled=True))),
    "evaluated": Region((half,), evaluated=True),
    "evaluated each": Region((half,), each=True, evaluated=True),
    "trained": Region((half,), trained=True),
    "switched": Region((switched_on,)),
    "uncached": Region((uncached,), keeps=False),
    "uncached float16": Region((partial(short, cache_enabled=False),), keeps=False),
    "uncached each": Region((uncached,), each=True, evaluated=True, keeps=False),
    "uncached nested": Region((uncached, half), evaluated=True, trained=True, keeps=False),
    "off": Region((off,), evaluated=True, keeps=False),
}


def run(way: Callable[..., Call], region: Region, compiled: Compile) -> list[Tensor]:
    """Train, and give all that is seen: losses, evaluations, weights and buffers."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    call, seen = way(compiled, model, optimizer), []

    def entered(wanted: bool) -> ExitStack:
        stack = ExitStack()
        for enter in region.enter if wanted else ():
            stack.enter_context(enter())
        return stack

    with entered(not region.each):
        for x, y in BATCHES:
            with entered(region.each):
                if region.evaluated:
                    with torch.no_grad():
                        seen.append(F.cross_entropy(model(x), y))
                if region.trained:
                    seen.append(train(model, optimizer, x, y).detach())
                seen.append(call(x, y).detach())
                if region.evaluated:
                    seen.append(F.cross_entropy(model(x), y).detach())
    return [*seen, *(tensor.clone() for tensor in model.state_dict().values())]


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(ours, expected, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


captured = partial(graphopt.compile, pipeline="none")


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("way", WAYS)
def test_bits_of_eager_code_or_refused(way: Callable[..., Call], region: str) -> None:
    try:
        expected = run(way, REGIONS[region], lambda function: function)
    except RuntimeError:  # whose casts of an evaluation have no history
        expected = []
    # A decorator decides where it is made whether it keeps casts, and a region where it is entered.
    keeping = way in (with_a_decorator, with_a_region_that_keeps) and region != "none"
    inheriting = way is with_a_region and region in ("off", "off within")
    if REGIONS[region].keeps or keeping or inheriting:
        with pytest.raises(graphopt.CaptureError, match="autocast") as refusal:
            run(way, REGIONS[region], captured)
        assert "cache_enabled=False" in str(refusal.value.hint)
        assert refusal.value.location is not None
    else:
        assert same(run(way, REGIONS[region], captured), expected)


@pytest.mark.parametrize("way", [by_closure, by_arguments, in_evaluation])
@pytest.mark.parametrize("region", ["loop", "each", "nested", "trained", "evaluated each"])
def test_run_eagerly_where_refused(way: Callable[..., Call], region: str) -> None:
    try:
        expected = run(way, REGIONS[region], lambda function: function)
    except RuntimeError:
        return
    assert same(run(way, REGIONS[region], partial(captured, fallback="eager")), expected)


def test_a_graph_of_before_is_not_used_in_a_region() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = with_a_region(captured, model, optimizer)
    step(*BATCHES[0])
    for enter in (half, off):
        with enter(), pytest.raises(graphopt.CaptureError, match="autocast"):
            step(*BATCHES[1])
    step(*BATCHES[1])
    assert len(step.captures) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["set_autocast_enabled", "set_autocast_cpu_enabled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_that_switches_autocast_without_a_region(name: str) -> None:
    switch = getattr(torch, name)
    given = ("cpu",) if name == "set_autocast_enabled" else ()

    def step(model: nn.Module, x: Tensor) -> Any:
        switch(*given, True)
        y = model(x)
        switch(*given, False)
        return y

    with pytest.raises(graphopt.CaptureError, match=name) as refusal:
        graphopt.capture(step, Model(), BATCHES[0][0])
    assert "switch(*given, True)" in str(refusal.value)
