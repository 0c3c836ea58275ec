"""Decisions by value on fake tensors: what a step makes of constants has a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphopt
from graphopt import _compat
from graphopt.errors import CaptureError
from slices import examples

causal = nn.Transformer.generate_square_subsequent_mask


def answers(decide: Callable[[nn.Module, Tensor], Any], fake: bool) -> list[Any]:
    """What `decide` said when a step was captured, given tensors with values or without."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * (2.0 if decide(model, x) else 3.0)
        loss.backward()
        return loss

    with _compat.new_fake_mode() if fake else nullcontext():
        model, x = nn.Linear(4, 4), torch.ones(3, 4)
    graph = graphopt.capture(step, model, x).graph_module.graph
    scaled = (n.args[1] for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    return [factor == 2.0 for factor in scaled if isinstance(factor, float)][:1]


def is_causal(model: nn.Module, x: Tensor) -> bool:
    return bool((causal(4) == torch.full((4, 4), -math.inf).triu(1)).all())


def of_another_type(model: nn.Module, x: Tensor) -> bool:
    return bool((causal(4).to(torch.bfloat16) == 0).float().bool().any())


def positions(model: nn.Module, x: Tensor) -> bool:
    index = torch.arange(4)
    return int(((index[:, None] >= index) * (index + 1)).sum()) > 20


def written_by_way_of_a_view(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(4)
    mask[1:][0].fill_(3)
    return bool((mask.flip(0)[2] == 3).item())


def uninitialized_before(model: nn.Module, x: Tensor) -> bool:
    return bool(torch.isinf(torch.empty(3, 3).fill_(-math.inf).triu_(1)).all())


def twice(model: nn.Module, x: Tensor) -> bool:
    mask = causal(3)
    first = bool(mask.any())
    mask.zero_()
    return first and bool(mask.any())


def beside_what_is_unknown(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(4)
    _ = model(x) + mask
    return bool((mask == 0).all())


def equal(model: nn.Module, x: Tensor) -> bool:
    return torch.equal(causal(3), causal(3))


def encoder(model: nn.Module, x: Tensor) -> bool:
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    return bool(nn.TransformerEncoder(layer, 2)(x[None], causal(3)).dim() == 3)


KNOWN = (
    is_causal, of_another_type, positions, written_by_way_of_a_view, uninitialized_before, twice,
    beside_what_is_unknown, equal, encoder,
)  # fmt: skip


@pytest.mark.parametrize("decide", KNOWN)
def test_the_answer_is_that_of_real_tensors(decide: Callable[[nn.Module, Tensor], Any]) -> None:
    expected = answers(decide, fake=False)
    assert expected and answers(decide, fake=True) == expected


def parameter(model: Any, x: Tensor) -> bool:
    return bool((model.weight > 0).any())


def batch(model: nn.Module, x: Tensor) -> bool:
    return bool(x.any())


def drawn(model: nn.Module, x: Tensor) -> bool:
    return bool((torch.rand(3) > 0.5).all())


def copied_from_a_batch(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(4)
    mask.copy_(x[0])
    return bool(mask.any())


def written_in_a_list(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(4)
    torch._foreach_add_([mask], [x[0]])
    return bool(mask.any())


def written_as_a_result(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(3, 4)
    torch.add(x, 1, out=mask)
    return bool(mask.any())


def a_view_of_it_is_written(model: nn.Module, x: Tensor) -> bool:
    mask = torch.zeros(2, 4)
    mask.t()[:, 1].mul_(x[0])
    return bool(mask.any())


def an_average(model: nn.Module, x: Tensor) -> bool:
    """Devices add fractions in other orders."""
    return bool(torch.full((1000,), 0.1).sum() == 100)


UNKNOWN = (
    parameter, batch, drawn, copied_from_a_batch, written_in_a_list, written_as_a_result,
    a_view_of_it_is_written, an_average,
)  # fmt: skip


@pytest.mark.parametrize("decide", UNKNOWN)
def test_what_has_no_value_is_refused(decide: Callable[[nn.Module, Tensor], Any]) -> None:
    assert answers(decide, fake=False)
    with pytest.raises(CaptureError, match="value of a tensor, and the tensors given are fake"):
        answers(decide, fake=True)


EDITS: tuple[Callable[[Tensor], Any], ...] = (
    lambda m: m.triu_(1),
    lambda m: m[1:].fill_(2),
    lambda m: m.t()[0].add_(3),
    lambda m: m.copy_(m.flip(0)),
    lambda m: m.masked_fill_(m > 2, 1),
    lambda m: m.view(-1)[::2].mul_(2),
    lambda m: m[:, 1:2].copy_(m[:, :1].clone()),
    lambda m: m[0].zero_(),
)


@settings(max_examples=examples(12))
@given(edits=st.lists(st.sampled_from(EDITS), max_size=6), asked=st.integers(0, 6))
def test_writes_are_seen_in_order(edits: list[Callable[[Tensor], Any]], asked: int) -> None:
    """In any program, whatever the view through which it writes, and after a question."""

    def decide(model: nn.Module, x: Tensor) -> bool:
        mask = torch.ones(3, 4, dtype=torch.long)
        seen = 0
        for number, edit in enumerate(edits):
            if number == asked:
                seen = int(mask.sum())
            edit(mask)
        return seen + int(mask.sum()) > 9

    assert answers(decide, fake=True) == answers(decide, fake=False)
