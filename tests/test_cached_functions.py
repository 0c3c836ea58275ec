"""Functions behind `functools.lru_cache` that give tensors are refused, and nothing of a trace is
left in them; the cures of the message, and plain values, are as in eager code."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import graphopt
from graphopt import CaptureError, _compat


@functools.lru_cache(maxsize=None)  # noqa: UP033
def positions(count: int) -> Tensor:
    return torch.arange(2 * count).float().view(count, 2)


@functools.lru_cache(maxsize=4)
def several(count: int, width: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.ones(count, width) * 0.5, {"half": positions(count) / 2}


@functools.cache
def like(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((count, 2), 0.25, device=device, dtype=dtype)


@functools.cache
def drawn(count: int) -> Tensor:
    return torch.rand(count, 2)


class Model(nn.Linear):
    scale = 3

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def mask(self, count: int) -> Tensor:
        return torch.ones(count, 2) * self.scale

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def of_weights(self, count: int) -> Tensor:
        return self.weight.detach().sum() * torch.ones(count, 2)


def by_position(model: Model, y: Tensor) -> Tensor:
    return y * positions(len(y))


def by_items(model: Model, y: Tensor) -> Tensor:
    first, others = several(len(y), width=2)
    return y * first + others["half"]


def by_device(model: Model, y: Tensor) -> Tensor:
    return y * like(len(y), y.device, y.dtype)


def by_method(model: Model, y: Tensor) -> Tensor:
    return y * model.mask(len(y))


def written_to(model: Model, y: Tensor) -> Tensor:
    positions(len(y)).add_(1)
    return y * positions(len(y))


def of_the_weights(model: Model, y: Tensor) -> Tensor:
    return y * model.of_weights(len(y))


def at_random(model: Model, y: Tensor) -> Tensor:
    return y * drawn(len(y))


REFUSED = [by_position, by_items, by_device, by_method, written_to, of_the_weights, at_random]


@functools.cache
def factor(count: int) -> float:
    return 0.5 / count


def by_number(model: Model, y: Tensor) -> Tensor:
    return y * factor(len(y))


def without_the_cache(model: Model, y: Tensor) -> Tensor:
    return y * positions.__wrapped__(len(y)) * Model.mask.__wrapped__(model, len(y))


FUNCTIONS = (positions, several, like, drawn, Model.mask, Model.of_weights)


def _forget() -> None:
    for function in FUNCTIONS:
        function.cache_clear()


def _losses(
    use: Callable[[Model, Tensor], Tensor], compiled: bool, warm: bool
) -> tuple[list[Any], Model]:
    _forget()
    torch.manual_seed(0)
    model = Model(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = use(model, model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if warm:
        use(model, torch.ones(4, 2))
    run = graphopt.compile(step) if compiled else step
    return [run(torch.rand(4 - call % 2, 3)).item() for call in range(6)], model


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("use", REFUSED)
def test_refused(use: Callable[[Model, Tensor], Tensor], warm: bool) -> None:
    with pytest.raises(CaptureError, match="__wrapped__") as caught:
        _losses(use, True, warm)
    assert __file__ in str(caught.value.location)
    for function in FUNCTIONS:
        held = [value for each in gc.get_referents(function) for value in _in(each)]
        assert not any(isinstance(value, FakeTensor) for value in held)


def _in(value: Any) -> list[Any]:
    return _compat.tree_leaves(value) if isinstance(value, (dict, tuple)) else [value]


@pytest.mark.parametrize("use", [by_number, without_the_cache])
def test_as_in_eager_code(use: Callable[[Model, Tensor], Tensor]) -> None:
    expected, eager = _losses(use, False, False)
    found, captured = _losses(use, True, False)
    assert found == expected
    assert captured.weight.tolist() == eager.weight.tolist()
