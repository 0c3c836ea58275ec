"""Attention and encoder layers in evaluation, by the kernels that eager code runs there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        output, weights = self.attention(x, x, x, **self.options)
        return output if weights is None else output + weights.sum()


def _masked(options: dict[str, Any]) -> nn.Module:
    return Attention(attn_mask=torch.ones(5, 5).triu(1).bool(), **options)


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "no weights": lambda: Attention(need_weights=False),
    "weights of each head": lambda: Attention(average_attn_weights=False),
    "masked": lambda: _masked({}),
    "masked, no weights": lambda: _masked({"need_weights": False}),
    "padded": lambda: Attention(key_padding_mask=torch.arange(5).expand(3, 5) > 3),
    "encoder": _encoder,
    "gelu": lambda: _encoder(activation="gelu"),
    "norms first": lambda: _encoder(norm_first=True),
    "odd heads": lambda: nn.TransformerEncoderLayer(15, 3, 32, batch_first=True),
    "sequences first": lambda: nn.TransformerEncoderLayer(16, 4, 32),
}


def left_by(name: str, compiled: bool) -> list[Tensor]:
    """A student learns from a teacher in evaluation, which follows it."""
    torch.manual_seed(0)
    student = MODULES[name]()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)

    def step(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student.train()(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(its, 0.5)
            predicted = student.eval()(x)
        return [loss.detach(), wanted, predicted, teacher(x)]

    run = graphopt.compile(step) if compiled else step
    width = 15 if name == "odd heads" else 16
    left: list[Tensor] = []
    for _ in range(2):
        left += [each.clone() for each in run(torch.randn(3, 5, width))]
    return left + [each.detach() for each in student.parameters()]


@pytest.mark.parametrize("name", MODULES)
def test_layers_in_evaluation(name: str) -> None:
    for expected, found in zip(left_by(name, False), left_by(name, True), strict=True):
        assert torch.equal(expected, found)


def test_nested_tensors_are_refused_with_what_works() -> None:
    mask = torch.arange(5).expand(3, 5) > 3

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(x, src_key_padding_mask=mask)
            return found

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(3, 5, 16)
    with pytest.raises(CaptureError, match="nested tensor") as refused:
        graphopt.compile(step)(nn.TransformerEncoder(layer, 2).eval(), x)
    assert "enable_nested_tensor=False" in str(refused.value)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert torch.equal(graphopt.compile(step)(model, x), step(model, x))
