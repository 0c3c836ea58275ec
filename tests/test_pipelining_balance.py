"""Stages of equal weight."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from graphopt.errors import PartitionError
from graphopt.pipelining import balanced, pipeline
from graphopt.pipelining.pipe.balance import cheapest_cuts, lightest_maximum
from pipeline_cases import CASES

X = torch.randn(3, 8)


def stage_sizes(model: nn.Module, num_stages: int) -> list[int]:
    pipe = pipeline(model, (X,), split_policy=balanced(num_stages))
    assert torch.equal(pipe(X), model(X))
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_equal_blocks_are_divided_equally(num_stages: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    assert stage_sizes(model, num_stages) == [6 // num_stages * 72] * num_stages


def test_a_heavy_layer_gets_a_stage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 8), nn.Linear(8, 8))
    assert stage_sizes(model, 2) == [72 + 1800, 1608 + 72]


def test_of_equal_divisions_the_one_that_sends_least_is_taken() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            wide = torch.cat([x, x, x], 1).exp()
            return self.two(wide.sum(1, keepdim=True).expand(-1, 8))

    model = Wide()
    pipe = pipeline(model, (X,), split_policy=balanced(2))
    received = pipe.get_stage_module(1).graph.find_nodes(op="placeholder")
    assert [tuple(node.meta["val"].shape) for node in received] == [(3, 1)]


def test_no_boundary_divides_a_list_of_tensors() -> None:
    class Chunks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = torch.chunk(self.one(x), 2, 1)
            return a * b

    pipe = pipeline(Chunks(), (X,), split_policy=balanced(2, weight=lambda node: 1.0, slack=9.0))
    received = pipe.get_stage_module(1).graph.find_nodes(op="placeholder")
    assert received
    assert all(isinstance(node.meta["val"], Tensor) for node in received)


def test_weights_can_be_given() -> None:
    def seconds(node: fx.Node) -> float:
        return 5.0 if node.target is torch.ops.aten.relu.default else 0.0

    model = CASES["mlp"].model(4)
    for block in model.blocks[:2]:
        block[1] = nn.Tanh()
    marked = nn.Sequential(*model.blocks)
    pipe = pipeline(marked, (X,), split_policy=balanced(2, weight=seconds, slack=0.0))
    relus = [str(pipe.get_stage_module(index).graph).count("aten.relu") for index in range(2)]
    assert relus == [1, 1]


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        (0, ValueError, "at least 1 stage, not 0"),
        (9, PartitionError, "2 calls cannot be divided into 9 stages"),
    ],
)
def test_impossible_numbers(stages: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (X,), split_policy=balanced(stages))


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_divisions_are_the_best_of_all(weights: list[int], data: st.DataObject) -> None:
    """Against trying every division."""
    count = len(weights)
    num_stages = data.draw(st.integers(1, count))
    across = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    slack = data.draw(st.sampled_from([0.0, 0.5]))

    def heaviest(ends: tuple[int, ...]) -> int:
        starts = [0, *(end + 1 for end in ends)]
        stops = [*starts[1:], count]
        return max(sum(weights[a:b]) for a, b in zip(starts, stops, strict=True))

    divisions = list(itertools.combinations(range(count - 1), num_stages - 1))
    best = min(map(heaviest, divisions))
    assert lightest_maximum(weights, num_stages) == pytest.approx(best)
    limit = best * (1 + slack)
    fewest = min(sum(across[e] for e in ends) for ends in divisions if heaviest(ends) <= limit)
    found = tuple(cheapest_cuts(weights, across, num_stages, limit))
    assert found in divisions
    assert heaviest(found) <= limit
    assert sum(across[end] for end in found) == fewest
