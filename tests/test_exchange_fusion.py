"""Scatters of sharded gradients in buckets: as many bits, fewer exchanges."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import graphopt
from graphopt.testing import fake_ranks
from zero_cases import Language, Uneven, clipped_step, train_step
from zero_graphs import assert_same_bits, computed, launches, sharded_graph

STEPS = {"plain": train_step, "clipped": clipped_step}
MODELS = {
    "even": lambda: Language(layers=2),
    "uneven": lambda: Language(layers=1, width=264),
    "mixed": Uneven,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [0.02, 25])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_same_bits_in_fewer_exchanges(
    ranks: int, stage: int, model: str, step: str, size: float
) -> None:
    with fake_ranks(ranks):
        made = [
            sharded_graph(
                MODELS[model], lambda p: torch.optim.AdamW(p, fused=True), STEPS[step], stage=stage
            )
            for _ in range(2)
        ]
        before, after = made
        count = len(launches(after, "all_to_all_single"))
        (record,) = graphopt.PassManager([("fuse_exchanges", {"bucket_size_mb": size})]).run(after)
        assert record.changes <= count
        if size == 25 and count > 1:
            assert len(launches(after, "all_to_all_single")) < count
        assert_same_bits(computed(before, ranks), computed(after, ranks))


def _own_text(graph: fx.Graph) -> str:
    return str(graph)


def test_nothing_to_fuse() -> None:
    with fake_ranks(2):
        gm = sharded_graph(Uneven, lambda p: torch.optim.SGD(p, lr=0.1), stage=1)
        before = _own_text(gm.graph)
        graphopt.PassManager([("fuse_exchanges", {"bucket_size_mb": 1e-6})]).run(gm)
        assert _own_text(gm.graph) == before


@pytest.mark.parametrize("size", [0, -1, True, "25"])
def test_bad_size(size: object) -> None:
    with fake_ranks(2):
        gm = sharded_graph(Uneven, lambda p: torch.optim.SGD(p, lr=0.1), stage=1)
        with pytest.raises(graphopt.GraphOptError, match="bucket_size_mb"):
            graphopt.PassManager([("fuse_exchanges", {"bucket_size_mb": size})]).run(gm)
