"""The parts of `graphopt demo` that need no ranks."""

from __future__ import annotations

import pytest
import torch

from graphopt.demo import DemoError
from graphopt.demo.compare import compare
from graphopt.demo.link import parse_rate
from graphopt.demo.model import CharGPT, GPTSize, write
from graphopt.demo.replica import RandomState
from graphopt.demo.report import Results, difference_text
from graphopt.demo.text import Text


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 200e6), ("1.5gbit", 1.5e9), ("64KBIT", 64e3)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "200", "mbit", "-1mbit", "0mbit", "200mbit 5ms"])
def test_refused_rates(text: str) -> None:
    with pytest.raises(DemoError, match="200mbit"):
        parse_rate(text)


def trained(value: float = 1.0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_compare_counts_parameters_buffers_and_optimizer_state() -> None:
    result = compare(trained(), trained())
    assert (result.tensors, result.differing, result.largest) == (2 + 3 + 6, (), 0.0)


def test_compare_sees_one_bit() -> None:
    one, other = trained(), trained()
    with torch.no_grad():
        other[0].running_mean[1] = -0.0
    result = compare(one, other)
    assert result.differing == ("running_mean",)
    assert result.largest == 0.0
    other[1].state_dict()["state"][0]["exp_avg"][2] += 0.25
    result = compare(one, other)
    assert result.differing == ("running_mean", "optimizer state 0.exp_avg")
    assert result.largest == pytest.approx(0.25)


def test_compare_calls_the_incomparable_infinitely_different() -> None:
    one, other = trained(), trained()
    with torch.no_grad():
        other[0].weight[0] = float("nan")
    assert compare(one, other).largest == float("inf")
    assert compare(one, (one[0], torch.optim.Adam(one[0].parameters()))).largest == float("inf")


def test_replicas_with_one_seed_draw_the_same_numbers() -> None:
    one, other = (RandomState(7, torch.device("cpu")) for _ in range(2))
    drawn: dict[RandomState, list[float]] = {one: [], other: []}
    for state in (one, other, other, one):
        state.restore()
        drawn[state].append(torch.rand(()).item())
        state.save()
    assert drawn[one] == drawn[other]
    assert drawn[one][0] != drawn[one][1]


def test_targets_are_the_next_characters() -> None:
    text = Text()
    inputs, targets = text.batch(3, 10, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert "The " in text.decode(text.numbers)


def test_model_has_millions_of_parameters_and_ties_its_embeddings() -> None:
    text = Text()
    model = CharGPT(GPTSize(len(text.alphabet)))
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    assert model.head.weight is model.tokens.weight
    written = write(model, text.numbers[:4], 70, torch.Generator().manual_seed(0))
    assert torch.equal(written[:4], text.numbers[:4])
    assert len(written) == 74
    assert model.training


def test_a_difference_is_said() -> None:
    results = Results()
    results.record(0, {"kind": "compared", "tensors": 5, "differing": [], "largest": 0.0})
    assert "Bit for bit the same: 5 tensors" in difference_text(results)
    results.record(1, {"kind": "compared", "tensors": 5, "differing": ["w"], "largest": 0.5})
    assert results.largest_difference == 0.5
    assert "Different: 1 of 10 tensors" in difference_text(results)
    assert "w (rank 1)" in difference_text(results)
