"""Steps that give tensors another shape or size in place: refused with the line where that is an
input, against eager where it is the step's own or stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

RESHAPED: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze": lambda x: x.unsqueeze_(-1).sum(-1),
    "transposed": lambda x: x.t_(),
    "other names": lambda x: x.swapaxes_(0, 1).swapdims_(0, 1).unsqueeze_(0),
    "strided": lambda x: x.as_strided_((3, 2), (4, 2)),
    "shrunk": lambda x: x.resize_(2, 4),
    "shrunk like another one": lambda x: x.resize_as_(torch.zeros(1, 4)),
    "grown": lambda x: x.resize_(8, 4).zero_(),
    "written to before": lambda x: x.add_(1).unsqueeze_(0)[0],
    "and back": lambda x: x.unsqueeze_(0).mul_(2).squeeze_(0),
}
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "as large": lambda x: x.resize_(x.shape).mul_(2),
    "as large as another one": lambda x: x.resize_as_(torch.zeros(3, 4)).mul_(2),
    "nothing to squeeze": lambda x: x.squeeze_().mul_(2),
    "of the step's own": lambda x: x.clone().unsqueeze_(-1).squeeze_(-1).t_(),
    "made in the step": lambda x: torch.empty(0).resize_as_(x).copy_(x),
    "as the message says": lambda x: x.unsqueeze(-1).sum(-1),
}


def results_of(use: Callable[[Tensor], Any], where: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model, kept = nn.Linear(4, 4), torch.randn(3, 4)
    model.register_buffer("scale", torch.randn(3, 4))

    def step(model: nn.Module, x: Tensor) -> Any:
        used = use({"argument": x, "outside": kept, "buffer": model.scale}[where])  # type: ignore[dict-item]
        return model(torch.ones(2, 4)).sum() + used.sum()

    run: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    for _ in range(3):
        x = torch.randn(3, 4)
        found += [run(model, x).item(), x, kept.clone(), model.scale.clone()]  # type: ignore[operator]
    return [each.tolist() if isinstance(each, Tensor) else each for each in found]


@pytest.mark.parametrize("where", ["argument", "outside", "buffer"])
@pytest.mark.parametrize("name", RESHAPED)
def test_another_shape_of_an_input_is_refused(name: str, where: str) -> None:
    with pytest.raises(graphopt.CaptureError, match="shape or strides of an input") as caught:
        results_of(RESHAPED[name], where, True)
    assert __file__ in str(caught.value.location)


@pytest.mark.parametrize("where", ["argument", "outside", "buffer"])
@pytest.mark.parametrize("name", KEPT)
def test_all_else_is_eager_s(name: str, where: str) -> None:
    assert results_of(KEPT[name], where, True) == results_of(KEPT[name], where, False)


def test_a_refused_step_leaves_the_shape() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def step(model: nn.Module, x: Tensor) -> Any:
        return model(x.mul_(2)).sum(), x.t_()

    before = x.clone()
    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(model, x)
    assert torch.equal(x, before)
    assert x.stride() == before.stride()
