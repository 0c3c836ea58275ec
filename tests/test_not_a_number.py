"""What is not a number, in a step: constants, arguments and what the step leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graphopt
from graphopt.ir.bits import same_bits

NAN = float("nan")


def _constant(model: nn.Module, x: Tensor) -> Any:
    return torch.where(x > 0, model(x), torch.tensor(NAN))


def _among_others(model: nn.Module, x: Tensor) -> Any:
    return x[0].new_tensor([1.0, NAN, -math.inf]) * model(x), torch.tensor([NAN, 2.0]).numpy().sum()


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
    model.hist.append(NAN)
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
