"""The parts of `graphopt demo` that need no ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphopt.demo.compare import compare
from graphopt.demo.model import CharGPT, GPTSize
from graphopt.demo.replica import ALPHABET, BATCH, DEFAULT_DDP, VARIANTS, Batches, RandomState
from graphopt.demo.report import Results, difference_text


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


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = Batches(0, 0, torch.device("cpu")).next()
    assert inputs.shape == targets.shape == (BATCH, GPTSize.length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    strides = (targets - inputs) % ALPHABET
    assert torch.equal(strides, strides[:, :1].expand_as(strides))
    assert len(strides[:, 0].unique()) > 3


def test_model_has_millions_of_parameters_and_ties_its_embeddings() -> None:
    model = CharGPT(GPTSize(ALPHABET))
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    assert model.head.weight is model.tokens.weight


def turn(link: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "kind": "turn",
        "link": link,
        "seconds": dict(zip(VARIANTS, seconds, strict=True)),
        "losses": dict.fromkeys(VARIANTS, 1.0),
    }


def test_the_slowest_rank_counts_and_the_best_ddp_is_of_each_link() -> None:
    results = Results()
    for rank, slower in ((0, 0.0), (1, 1.0)):
        results.record(rank, turn(0, [1, 4 + slower, 6, 7, 3]))
        results.record(rank, turn(1, [1, 9, 4 + slower, 7, 4]))
    assert results.links == [0, 1]
    assert results.seconds(DEFAULT_DDP, 0) == [5.0]
    assert [results.best_ddp(link) for link in (0, 1)] == [DEFAULT_DDP, "DDP, 1 MB"]
    assert results.ratios(DEFAULT_DDP, 0) == [3 / 5]
    assert results.ratios(results.best_ddp(1), 1) == [4 / 5]


def test_a_difference_is_said() -> None:
    results = Results()
    results.record(0, {"kind": "compared", "tensors": 5, "differing": [], "largest": 0.0})
    assert "Bit for bit the same: 5 tensors" in difference_text(results)
    results.record(1, {"kind": "compared", "tensors": 5, "differing": ["w"], "largest": 0.5})
    assert results.largest_difference == 0.5
    assert "Different: 1 of 10 tensors" in difference_text(results)
    assert "w (rank 1)" in difference_text(results)
