"""Numbers outside a step: signs of zeros, types, NaN, variables of a loop around it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graphopt
from graphopt.ir.bits import same_bits
from graphopt.ir.same_values import same_value

NUMBERS = st.one_of(st.floats(), st.integers(-2, 2), st.booleans(), st.sampled_from([0.0, -0.0]))


def written(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(written, value))
    if value != value:
        return "NaN"
    return struct.pack("d", value) if type(value) is float else (type(value), value)


@given(st.lists(NUMBERS, max_size=2).map(tuple) | NUMBERS, st.lists(NUMBERS, max_size=2).map(tuple))
def test_values_are_the_same_where_they_are_written_alike(one: Any, other: Any) -> None:
    for a, b in ((one, other), (one, one), (other[:1], tuple(map(float, other[:1])))):
        assert same_value(a, b, lambda value: True) == (written(a) == written(b))


PLACES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "attribute of the model": lambda model, optimizer, held: model.scale,
    "tuple of the model": lambda model, optimizer, held: model.pair[0],
    "dictionary of the model": lambda model, optimizer, held: model.table["scale"],
    "setting of the optimizer": lambda model, optimizer, held: optimizer.param_groups[0]["scale"],
    "attribute of the optimizer": lambda model, optimizer, held: optimizer.scale,
    "object outside": lambda model, optimizer, held: held.scale,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_step_goes_on_with_the_value_of_the_call(place: str) -> None:
    def run(compiled: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        held = SimpleNamespace()

        @compiled
        def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return torch.ones(1) * PLACES[place](model, optimizer, held)

        found = []
        for value in (0.0, -0.0, 0, True, 1, 1.0, float("nan"), 0.0):
            model.scale = optimizer.scale = held.scale = value
            model.pair, model.table = (value, 1), {"scale": value}
            optimizer.param_groups[0]["scale"] = value
            result = step(model, optimizer, torch.ones(1, 2))
            found.append((repr(result.item()), result.dtype))
        return found

    assert run(lambda fn: fn) == run(graphopt.compile)


NAN = float("nan")


def _constant(model: nn.Module, x: Tensor) -> Any:
    return torch.where(x > 0, model(x), torch.tensor(NAN))


def _among_others(model: nn.Module, x: Tensor) -> Any:
    return x[0].new_tensor([1.0, NAN, -math.inf]) * model(x), torch.tensor([NAN, 2.0]).sum()


def _filled(model: nn.Module, x: Tensor) -> Any:
    return torch.full((3,), NAN), model(x).masked_fill(x > 0, NAN).nanmean()


def _largest(model: nn.Module, x: Tensor) -> Any:
    out = model(x)
    worst = (out / (out.detach() - out.detach().amax())).max()  # NaN among what is compared
    worst.backward()
    return [worst.detach(), *(p.grad for p in model.parameters())]


def _kept(model: nn.Module, x: Tensor) -> Any:
    loss = model(x).mean()
    if math.isnan(model.best) or loss.item() < model.best:
        model.best = loss.item()
    model.table["last"] = NAN
    return loss.detach()


def _module() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 3)
    model.best, model.hist, model.table = NAN, [1.0], {"first": NAN}
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [_constant, _among_others, _filled, _largest, _kept])
def test_as_in_eager_code(step: Callable[..., Any]) -> None:
    ours, theirs = _module(), _module()
    captured = graphopt.compile(step, pipeline="none")
    for seed in range(3):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        pairs = zip(
            tree_leaves([captured(ours, x), ours.hist, ours.best, ours.table]),
            tree_leaves([step(theirs, x), theirs.hist, theirs.best, theirs.table]),
            strict=True,
        )
        for mine, other in pairs:
            assert same_bits(torch.as_tensor(mine).detach(), torch.as_tensor(other).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_same_bits(dtype: torch.dtype) -> None:
    one = torch.arange(6).to(dtype).reshape(2, 3)
    assert same_bits(one, one.t().contiguous().t())
    assert not same_bits(one, one.flatten())
    assert not same_bits(one, one.to(torch.complex128))
    assert not same_bits(one, one.flip(0))
    if dtype.is_complex:
        assert same_bits(one.conj(), one.conj().resolve_conj())


Loop = Callable[[nn.Module, Any, Callable[[Any], Any]], tuple[list[float], Any]]


def rate(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    def rate_at(number: int) -> float:
        return 0.1 * (1 + number) / (2 + number)

    @wrap
    def step(x: Tensor) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for number in range(9):  # noqa: B007 - read by the step
        losses.append(step(torch.ones(2, 3)))
    return losses, step


def factor(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> Any:
    share = 0.0

    @wrap
    def step(x: Tensor) -> float:
        loss = model(x).square().mean() * share
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for number in range(9):
        share = number / 8
        losses.append(step(torch.ones(2, 3)))
    return losses, step


def windows(model: nn.Module, optimizer: Any, wrap: Callable[[Any], Any]) -> Any:
    rows = torch.randn(24, 3)
    shown: list[str] = []

    @wrap
    def step() -> float:
        weight = 0.5 if (epoch + 1) % 3 == 0 else 1.0
        loss = model(rows[batch * 8 : (batch + 1) * 8]).square().mean() * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown.append(f"epoch {epoch} batch {batch} loss {loss.item():.4f}")
        return loss.item()

    losses = []
    for epoch in range(5):  # noqa: B007 - read by the step
        for batch in range(3):  # noqa: B007
            losses.append(step())
    return [*losses, *shown], step


@pytest.mark.parametrize(("loop", "graphs"), [(rate, 3), (factor, 3), (windows, 8)])
def test_few_graphs_serve_all_numbers(loop: Loop, graphs: int) -> None:
    found = []
    for wrap in (lambda step: step, graphopt.compile):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results, step = loop(model, optimizer, wrap)
        found.append((results, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1]
    assert len(step.captures) <= graphs
