"""What a step leaves behind shares memory where eager's does, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


def flat_gradients(model: nn.Module, x: Tensor) -> Any:
    """As gradients are projected: flattened, changed and put back."""
    model(x).square().mean().backward()
    flat = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
    start = 0
    for p in model.parameters():
        assert p.grad is not None
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()
    return flat


def both_kept(model: nn.Module, x: Tensor) -> Any:
    first = model(x).detach() * 2
    second = torch.empty_like(first)
    second.copy_(first)
    return first, second


def of_a_parameter(model: nn.Module, x: Tensor) -> Any:
    kept = torch.empty_like(next(model.parameters()))
    with torch.no_grad():
        kept.copy_(next(model.parameters()))
    return kept


def of_an_argument(model: nn.Module, x: Tensor) -> Any:
    model.train()
    return torch.empty_like(x).copy_(x)


def of_a_view(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[1])
    kept.copy_(made[0])
    return made, kept


def of_gradients(model: nn.Module, x: Tensor) -> Any:
    kept = [torch.zeros_like(p) for p in model.parameters()]
    model(x).mean().backward()
    for to, p in zip(kept, model.parameters(), strict=True):
        assert p.grad is not None
        to.copy_(p.grad)
    return kept


def shared_as_well(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty_like(made)
    kept.copy_(made)
    return made, made.view(-1), kept


def other_strides(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[1], made.shape[0]).t()
    kept.copy_(made)
    return made, kept


def part(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[0], 2)
    kept.copy_(made[:, :2])
    return made, kept


def _left(step: Callable[..., Any], compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.randn(2, 4)
    found = (graphopt.compile(step) if compiled else step)(model, x)
    results = [found] if isinstance(found, Tensor) else list(found)
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*results, x, *parameters, *gradients]


def _sharing(tensors: Sequence[Tensor]) -> list[list[bool]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[one == other for one in places] for other in places]


STEPS = (flat_gradients, both_kept, of_a_parameter, of_an_argument, of_a_view, of_gradients,
         shared_as_well, other_strides, part)  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_memory_is_shared_as_in_eager(step: Callable[..., Any]) -> None:
    found, expected = (_left(step, compiled) for compiled in (True, False))
    assert _sharing(found) == _sharing(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_two_pairs_that_share_memory_are_refused() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        made = model(x).detach() * 2
        kept = torch.empty_like(made)
        kept.copy_(made)
        return made, made.view(-1), kept, kept.view(-1)

    with pytest.raises(graphopt.CaptureError, match="share memory"):
        graphopt.compile(step)(nn.Linear(4, 3), torch.randn(2, 4))
