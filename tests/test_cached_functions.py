"""Functions behind `functools.lru_cache` that give tensors: the graph takes what the cache has."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt import CaptureError


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


def decided(model: Model, y: Tensor) -> Tensor:
    return by_position(model, y) if y.sum() > 0 else by_device(model, y)


USES = [by_position, by_items, by_device, by_method, written_to, decided]


def _forget() -> None:
    for function in (positions, several, like, drawn, Model.mask, Model.of_weights):
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
@pytest.mark.parametrize("use", USES)
def test_as_in_eager_code(use: Callable[[Model, Tensor], Tensor], warm: bool) -> None:
    expected, eager = _losses(use, False, warm)
    found, captured = _losses(use, True, warm)
    assert found == expected
    assert captured.weight.tolist() == eager.weight.tolist()
    assert eager.mask.cache_info().currsize == captured.mask.cache_info().currsize


def test_nothing_of_a_trace_is_left_in_a_cache() -> None:
    for use in (lambda m, y: y * m.of_weights(len(y)), lambda m, y: y * drawn(len(y))):
        with pytest.raises(CaptureError, match="with a cache"):
            _losses(use, True, False)
        for function in (positions, Model.of_weights, drawn):
            held = [value for each in gc.get_referents(function) for value in _in(each)]
            assert not [value for value in held if isinstance(value, Tensor)]


def _in(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def test_random_numbers_that_a_cache_keeps() -> None:
    """Each capture would draw them anew, when it calls the function first."""
    with pytest.raises(CaptureError, match="call it once before the first step"):
        _losses(lambda m, y: y * drawn(len(y)), True, False)
    first = torch.rand(1)
    torch.manual_seed(0)
    Model(3, 2)
    torch.rand(4, 3)  # the first call's
    assert torch.equal(first, torch.rand(1))
