"""How many collectives a step has, by cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.cost import Collective, CostModel, Transfer, default_cost_model
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.passes import comm_fusion_with_concat
from graphopt.schedule import collectives_by_cost
from graphopt.schedule.granularity import MOST
from sketch import gradients, one_rank


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def costs(compute: float, overhead: float, latency: float = 0.0) -> CostModel:
    """A model of constants; every collective takes a second on the link."""

    def transfer(collective: Collective) -> Transfer:
        return Transfer(latency, 1.0, overhead=overhead)

    return CostModel(lambda node: compute if node.op == "output" else 0.0, transfer)


@pytest.mark.parametrize(
    ("compute", "overhead", "latency", "count"),
    [
        (100.0, 1.0, 0.0, 8),
        (100.0, 0.5, 0.5, 8),
        (1.0, 4.0, 0.0, 1),  # rather one than half of one
        (100.0, 0.0, 0.0, MOST),
        (1e9, 1.0, 0.0, MOST),
        (0.0, 1.0, 0.0, 1),
    ],
)
def test_count(compute: float, overhead: float, latency: float, count: int) -> None:
    gm = gradients((4,), (4,))
    launches = find_nodes(gm.graph, is_collective)
    assert collectives_by_cost(gm.graph, launches, costs(compute, overhead, latency)) == count
    assert collectives_by_cost(gm.graph, [], costs(compute, overhead, latency)) == 1


def buckets_of(width: int, rows: int, layers: int = 12) -> list[int]:
    """Bytes of the buckets by cost of a model of equal layers."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.ones(rows, width)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    parallel = graphopt.DataParallel()
    captured = graphopt.capture(step, model, optimizer, inputs, parallel=parallel)
    comm_fusion_with_concat(captured.graph_module, min_buckets=None)
    return [block.nbytes for block in get_all_comm_blocks(captured.graph_module)]


def test_little_compute_has_few_collectives_and_much_has_many() -> None:
    few, some, many = buckets_of(512, 8), buckets_of(512, 512), buckets_of(1024, 16384)
    assert len(few) < len(some) <= len(many)
    assert len(few) <= 6
    assert max(many) <= 5 * 2**20


def test_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither times of today nor threads of this machine decide."""
    gm = gradients((2**18,), (2**18,))
    launches = find_nodes(gm.graph, is_collective)
    first = collectives_by_cost(gm.graph, launches, default_cost_model(gm.graph))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert collectives_by_cost(gm.graph, launches, default_cost_model(gm.graph)) == first
