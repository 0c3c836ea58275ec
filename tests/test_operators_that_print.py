"""What the kernel of an operator shows is no work of the step: the graph calls it in every step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

_library = torch.library.Library("of_prints", "DEF")
ours: Any = torch.ops.of_prints


@torch.library.custom_op("of_prints::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    print("kernel", tuple(x.shape))
    sys.stdout.write("kernel writes\n")
    logging.getLogger("of_prints").warning("kernel warns")
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    print("shape rule")
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("of_prints::written", mutates_args={"x"})
def written(x: Tensor) -> None:
    print("kernel")
    x.mul_(2)


_library.define("third(Tensor x) -> Tensor")


@torch.library.impl(_library, "third", "CompositeExplicitAutograd")
def third(x: Tensor) -> Tensor:
    print("kernel")
    return x / 3


def _written(x: Tensor) -> Tensor:
    copy = x.detach().clone()
    written(copy)
    return x + copy


@torch.library.custom_op("of_prints::spoken", mutates_args=())
def spoken(x: Tensor) -> Tensor:
    return x * 3


spoken.register_fake(torch.empty_like)
spoken.register_autograd(
    lambda ctx, gradient: gradient * 3, setup_context=lambda ctx, inputs, output: print("context")
)


class Spoken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        print("forward")
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "custom_op": doubled,
    "one that writes": _written,
    "of a library": lambda x: x + ours.third(x.detach()),
}


def trained(call: Callable[[Tensor], Tensor], captured: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = call(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = graphopt.compile(train) if captured else train
    losses = [step(torch.ones(2, 4)).detach() for _ in range(3)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_that_prints(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained(KERNELS[kind], captured=False)
    eager = capsys.readouterr().out.count("kernel\n")
    assert all(map(torch.equal, trained(KERNELS[kind], captured=True), expected))
    assert capsys.readouterr().out.count("kernel\n") >= eager


@pytest.mark.parametrize("call", [Spoken.apply, lambda x: spoken(x)], ids=["function", "context"])
def test_what_is_recorded_may_not_print(call: Callable[[Tensor], Tensor]) -> None:
    """It would print while it is traced, and in no other call."""
    with pytest.raises(CaptureError, match="it prints"):
        trained(call, captured=True)
