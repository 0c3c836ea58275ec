"""Gradients whose formulas ask whether anybody traces: those of eager code, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.ir.bits import same_bits

INF, NAN = math.inf, math.nan
SPECIAL: dict[str, list[float]] = {
    "plain": [0.3, -1.7, 2.9, 0.11, -0.6, 5.3, 1.01],
    "one zero": [0.3, -1.7, 0.0, 0.11, -0.6, 5.3, 1.01],
    "zeros": [0.3, -1.7, 0.0, 0.11, -0.0, 5.3, 1.01],
    "infinite": [0.3, -1.7, INF, 0.11, -0.6, 5.3, 1.01],
    "not a number": [0.3, -1.7, 2.9, NAN, -0.6, 5.3, 1.01],
    "twice the largest": [0.3, -1.7, 5.3, 0.11, -0.6, 5.3, 1.01],
}
MASK = torch.tensor([True, False, True, True, False, True, True])

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prod": lambda x, y: x.prod(),
    "prod of rows": lambda x, y: torch.stack([x, y + 3]).prod(-1),
    "prod of columns": lambda x, y: torch.stack([x, y]).prod(0, keepdim=True),
    "prod in double": lambda x, y: x.prod(dtype=torch.float64),
    "cumprod": lambda x, y: torch.cumprod(x, -1),
    "max": lambda x, y: x.max() * y,
    "min": lambda x, y: torch.min(x) * -y,
    "median": lambda x, y: x.median() * y,
    "nanmedian": lambda x, y: x.nanmedian() * y,
    "max of all": lambda x, y: (x.view(7, 1) - y).max(),
    "filled": lambda x, y: y.masked_fill(MASK, x.sum()),
    "filled in place": lambda x, y: (y * 2).masked_fill_(MASK, x[0]),
    "filled by a number": lambda x, y: x.masked_fill(MASK, 3.0) * y,
}


def _differentiated(
    function: Callable[[Tensor, Tensor], Tensor], around: Callable[..., Any]
) -> Callable[..., list[Tensor]]:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = (each.detach().requires_grad_() for each in (x, y))
        result = around(function, x, y)
        (result * result.detach()).sum().backward()
        return [result.detach(), *(each.grad for each in (x, y) if each.grad is not None)]

    return step


def _plainly(function: Any, *args: Tensor) -> Any:
    return function(*args)


def _checkpointed(function: Any, *args: Tensor) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _reentrant(function: Any, *args: Tensor) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def _offloaded(function: Any, *args: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return function(*args)


def _assert_exact(step: Callable[..., list[Tensor]], *given: Tensor, **options: Any) -> None:
    expected = step(nn.Identity(), *given)
    compiled = graphopt.compile(step, **{"pipeline": "none", **options})
    for _ in range(2):
        found = compiled(nn.Identity(), *given)
        assert len(found) == len(expected)
        for mine, other in zip(found, expected, strict=True):
            assert same_bits(mine, other), (mine, other)
            assert mine.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_special_values(name: str, dtype: torch.dtype) -> None:
    step = _differentiated(FUNCTIONS[name], _plainly)
    model, compiled = nn.Identity(), graphopt.compile(step, pipeline="none")
    for values in SPECIAL.values():
        x, y = torch.tensor(values, dtype=dtype), torch.linspace(-1, 2, 7).to(dtype)
        for mine, other in zip(compiled(model, x, y), step(model, x, y), strict=True):
            assert same_bits(mine, other), (values, mine, other)
    assert len(compiled.captures) == 1


@pytest.mark.parametrize("around", [_checkpointed, _reentrant, _offloaded])
@pytest.mark.parametrize("name", ["prod", "max", "filled"])
def test_of_what_is_unpacked_once(name: str, around: Callable[..., Any]) -> None:
    step = _differentiated(FUNCTIONS[name], around)
    x, y = torch.tensor(SPECIAL["plain"]), torch.linspace(-1, 2, 7)
    _assert_exact(step, x, y)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_of_matrices_lies_as_in_eager_code() -> None:
    def step(model: nn.Module, a: Tensor, tau: Tensor, other: Tensor) -> list[Tensor]:
        given = [each.detach().requires_grad_() for each in (a, tau, other)]
        turned = torch.ormqr(*given) + torch.linalg.householder_product(*given[:2])
        return [turned.detach(), *torch.autograd.grad(turned.square().sum(), given)]

    generator = torch.Generator().manual_seed(3)
    square, other = (torch.randn(5, 5, generator=generator) for _ in range(2))
    _assert_exact(step, *torch.geqrf(square), other)


@pytest.mark.parametrize("kinds", [("float32", "float64"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_of_several_dtypes(kinds: tuple[str, str], reduction: str) -> None:
    logit_type, target_type = (getattr(torch, kind) for kind in kinds)

    def step(model: nn.Module, logits: Tensor, target: Tensor) -> list[Tensor]:
        logits, target = (each.detach().requires_grad_() for each in (logits, target))
        loss = functional.binary_cross_entropy_with_logits(
            logits, target, target.detach() + 0.3, reduction=reduction
        )
        return [loss.detach(), *torch.autograd.grad((loss * 1.7).sum(), (logits, target))]

    logits = torch.linspace(-3, 2, 33).to(logit_type)
    _assert_exact(step, logits, torch.rand(33, generator=torch.Generator()).to(target_type))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.prod(), lambda x: x.cumprod(0).sum(), lambda x: torch.linalg.det(x.view(2, 2))],
    ids=["prod", "cumprod", "det"],
)
def test_refused_where_differentiated_further(function: Callable[[Tensor], Tensor]) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    with pytest.raises(graphopt.CaptureError, match="differentiates a gradient of") as caught:
        graphopt.compile(step, pipeline="none")(nn.Identity(), torch.arange(1.0, 5.0))
    assert "create_graph" in str(caught.value)


def test_largest_differentiated_further() -> None:
    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        largest = (x * x).max() * x.median()
        (gradient,) = torch.autograd.grad(largest, x, create_graph=True)
        return [gradient.detach(), torch.autograd.grad(gradient.square().sum(), x)[0]]

    _assert_exact(step, torch.tensor(SPECIAL["plain"]))


def test_in_training() -> None:
    """A model with a product, and a learned value in the place of what is masked."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
            self.hidden = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x)).masked_fill(MASK, self.hidden)
            return self.last(h / h.detach().abs().max()) * (1 + h).prod(-1, keepdim=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() + model(x).max()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def trained(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses = [run(model, optimizer, torch.randn(5, 7)) for _ in range(4)]
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    for mine, other in zip(trained(graphopt.compile(step)), trained(step), strict=True):
        assert same_bits(mine, other)


@pytest.mark.parametrize("decides", [False, True])
def test_where_a_size_depends_on_the_gradient(decides: bool) -> None:
    """The trace computes the gradient's values, to know how many rows there are."""

    def step(model: Any, x: Tensor) -> Tensor:
        loss = (model(x).tanh() + 1.5).prod(1).sum() + model(x)[x[:, 0] > 0].prod(1).sum()
        loss.backward()
        gradient = model.weight.grad.clone()
        rows = gradient[gradient[:, 0] > 0]
        if decides:
            loss = loss * (2 if len(rows) > 1 else 3)
        for index in range(len(rows)):
            loss = loss + rows[index].sum()
        model.zero_grad()
        result: Tensor = loss.detach()
        return result

    torch.manual_seed(0)
    run, model = graphopt.compile(step), nn.Linear(6, 4)
    for x in torch.randn(4, 8, 6):
        assert torch.equal(run(model, x), step(model, x))


@pytest.mark.parametrize("shape", [(64, 9), (3, 5, 7, 8)], ids=["rows", "pixels"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_smoothed_cross_entropy_with_weights(shape: tuple[int, ...], reduction: str) -> None:
    def step(model: nn.Module, logits: Tensor, target: Tensor, weight: Tensor) -> list[Tensor]:
        loss = nn.CrossEntropyLoss(
            weight, ignore_index=255, label_smoothing=0.4, reduction=reduction
        )
        logits = logits.detach().requires_grad_()
        found = loss(logits, target)
        again = functional.cross_entropy(logits, target % shape[1], weight, label_smoothing=1.0)
        (found.sum() + again).backward()
        assert logits.grad is not None
        return [found.detach(), again.detach(), logits.grad]

    model, compiled = nn.Identity(), graphopt.compile(step, pipeline="none")
    generator = torch.Generator().manual_seed(4)
    places = (shape[0], *shape[2:])
    for _ in range(12):
        logits = torch.randn(shape, generator=generator)
        weight = torch.rand(shape[1], generator=generator) + 0.1
        target = torch.randint(shape[1], places, generator=generator)
        target[torch.rand(places, generator=generator) < 0.3] = 255
        given = logits, target, weight
        for mine, other in zip(compiled(model, *given), step(model, *given), strict=True):
            assert same_bits(mine, other)
