"""Sizes that depend on the values of constants alone are numbers at once, without an assumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt
from graphopt._compat.remembering import RememberingMode
from graphopt.host.assumptions import Assumption


def counted(x: Tensor) -> Tensor:
    sizes = torch.tensor([2, 2, 3])
    ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
    start, out = 0, x.new_zeros(())
    for end in ends:
        out = out + x[start:end].sum() * (end - start)
        start = end
    return out


def chosen(x: Tensor) -> Tensor:
    return x[torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]).nonzero().squeeze(1)]


def masked(x: Tensor) -> Tensor:
    return x[torch.arange(8) % 3 == 0] * x.masked_select(torch.arange(8) % 3 == 1).sum()


def distinct(x: Tensor) -> Tensor:
    found = torch.unique(torch.tensor([3, 1, 3, 2]))
    return x[found] * len(found)


def in_place(x: Tensor) -> Tensor:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[2:5] = True
    mask[3] = False
    return x[mask]


def repeated(x: Tensor) -> Tensor:
    return x[:2].repeat_interleave(torch.tensor([2, 3]), dim=0)


def counted_bins(x: Tensor) -> Tensor:
    return x.sum() * torch.bincount(torch.tensor([0, 2, 2]))


@pytest.mark.parametrize(
    "step", [counted, chosen, masked, distinct, in_place, repeated, counted_bins]
)
def test_they_are_known(step: Callable[[Tensor], Tensor]) -> None:
    captured = graphopt.capture(step, torch.ones(8))
    nodes = captured.graph_module.graph.nodes
    assert not any(isinstance(node.target, Assumption) for node in nodes)
    run = graphopt.compile(step)
    for _ in range(2):
        x = torch.rand(8)
        assert torch.equal(run(x), step(x))
    assert len(run.captures) == 1


def test_what_an_input_is_written_into_is_no_constant() -> None:
    def step(x: Tensor) -> Tensor:
        mask = torch.zeros(8, dtype=torch.bool)
        mask[:] = x > 0.5
        return x[mask].sum()

    run = graphopt.compile(step)
    for _ in range(4):
        x = torch.rand(8)
        assert torch.equal(run(x), step(x))


def test_what_is_drawn_is_no_constant() -> None:
    def step(x: Tensor) -> Tensor:
        return x[torch.rand(8) > 0.5].sum()

    run = graphopt.compile(step)
    for seed in range(4):
        torch.manual_seed(seed)
        found = run(torch.ones(8))
        torch.manual_seed(seed)
        assert torch.equal(found, step(torch.ones(8)))


def test_a_slice_takes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace went through all rows of what a step takes a slice of."""
    times = [0]
    dispatch = RememberingMode.__torch_dispatch__

    def count(self: Any, *args: Any) -> Any:
        times[0] += 1
        return dispatch(self, *args)

    monkeypatch.setattr(RememberingMode, "__torch_dispatch__", count)
    asked = []
    for rows in (3, 300):
        times[0] = 0
        graphopt.capture(lambda x: x[1:3] + x[:-1].sum(), torch.ones(rows, 2))
        asked.append(times[0])
    assert asked[0] == asked[1]
