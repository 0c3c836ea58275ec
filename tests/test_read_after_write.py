"""What a step reads from a tensor before and after writing to it, whatever operator writes: two
numbers, two sizes, two decisions; and optimizers that are stepped twice in one step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Write = Callable[[Tensor, Tensor], object]
Read = Callable[[Tensor], Any]


def by_fused_optimizer(kept: Tensor, other: Tensor) -> None:
    rest = ([torch.zeros_like(kept)] for _ in range(2))
    torch._fused_adam_(
        *([kept], [other], *rest, [], [torch.ones(())]),
        lr=0.5,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def by_unscaling(kept: Tensor, other: Tensor) -> None:
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([kept], found, torch.full((1,), 3.0))


WRITES: dict[str, Write] = {
    "add_": lambda kept, other: kept.add_(other),
    "copy_": lambda kept, other: kept.copy_(other),
    "out": lambda kept, other: torch.mul(kept, other, out=kept),
    "item": lambda kept, other: kept.__setitem__(0, other[1]),
    "view": lambda kept, other: kept[:1].sub_(other[:1]),
    "masked": lambda kept, other: kept.masked_fill_(other > 0, 0.0),
    "list": lambda kept, other: torch._foreach_add_([kept], [other]),
    "list and number": lambda kept, other: torch._foreach_mul_([kept], -1.5),
    "list and tensor": lambda kept, other: torch._foreach_add_([kept], torch.tensor(1.5)),
    "copied list": lambda kept, other: torch._foreach_copy_([kept], [other]),
    "list of views": lambda kept, other: torch._foreach_zero_([kept[:1], kept[2:]]),
    "out of a list": lambda kept, other: torch.ops.aten._foreach_add.Scalar_out(
        [other], 1.0, out=[kept]
    ),
    "fused optimizer": by_fused_optimizer,
    "unscaling": by_unscaling,
}
READS: dict[str, Read] = {
    "number": lambda kept: kept.sum().item(),
    "element": lambda kept: kept[0].item(),
    "whole number": lambda kept: int(kept[0] * 4),
    "sum of both": lambda kept: kept.mean().item() + kept.amax().item(),
    "sizes": lambda kept: kept[kept > 0].sum(),
    "where": lambda kept: kept.nonzero().sum(),
    "distinct": lambda kept: torch.unique(kept).numel(),
    "decision": lambda kept: kept * 2 if kept.sum() > 0 else kept - 1,
    "scalar": lambda kept: kept.view(3)[0].view(()).item(),
}


def left(step: Callable[..., Any], kept: Tensor) -> list[Any]:
    return [(step(kept, other), kept.clone()) for other in _OTHERS]


_OTHERS = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([-3.0, 0.0, 2.0]), torch.ones(3)]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_read_behind_a_write_is_what_was_written(write: str, read: str) -> None:
    def step(kept: Tensor, other: Tensor) -> Any:
        before = READS[read](kept)
        WRITES[write](kept, other)
        between = READS[read](kept)
        WRITES[write](kept, other)
        return before, between, READS[read](kept)

    start = torch.tensor([0.25, -1.0, 3.0])
    expected = left(step, start.clone())
    found = left(graphopt.compile(step), start.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("write", WRITES)
def test_one_tensor_of_one_element(write: str) -> None:
    """Of which torch keeps the number itself."""

    def step(kept: Tensor, other: Tensor) -> Any:
        numbers = [kept.item()]
        for _ in range(2):
            WRITES[write](kept.view(1), other[:1])
            numbers += [kept.item(), kept.item()]
        return numbers

    if write in ("item", "list of views"):
        pytest.skip("it needs more elements")
    expected = left(step, torch.tensor(0.25))
    found = left(graphopt.compile(step), torch.tensor(0.25))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "Rprop")
FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "RMSprop", "SGD"])
def test_an_optimizer_that_is_stepped_twice(name: str, form: str) -> None:
    if form == "fused" and name not in ("Adagrad", "Adam", "AdamW", "SGD"):
        pytest.skip("there is no such kernel")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    kind = getattr(torch.optim, name)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> list[Tensor]:
        losses = []
        for shift in (0.0, 1.0):
            loss = (model(x) - shift).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    step = graphopt.compile(train_step)
    optimizers = [kind(each.parameters(), **FORMS[form]) for each in (model, twin)]
    for _ in range(4):
        x = torch.randn(5, 4)
        found, expected = step(model, optimizers[0], x), train_step(twin, optimizers[1], x)
        assert all(map(torch.equal, found, expected))
    step.flush()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
