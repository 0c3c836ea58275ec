"""ZeRO on real ranks: the bits of DDP, with the optimizer's state in rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphopt
from gloo import Pool
from zero_cases import Beside, Language, Uneven, batches, clipped_step, same, sharded


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run_language(rank: int, stage: int, pipeline: str) -> dict[str, Any]:
    pair = Beside(Language, adamw, stage=stage, pipeline=pipeline)
    pair.run(rank)
    pair.compare()
    state = pair.optimizer.state[pair.model.blocks[0].up.weight]
    records = [record.name for record in pair.step.report]
    return {
        "moment": type(state["exp_avg"]).__name__,
        "rows": tuple(state["exp_avg"].to_local().shape),
        "parameter": type(pair.model.blocks[0].up.weight).__name__,
        "records": records,
    }


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_stage_one_is_ddp(two_ranks: Pool, pipeline: str) -> None:
    for found in two_ranks.run(run_language, 1, pipeline):
        assert found["moment"] == "DTensor"
        assert found["rows"] == (64, 64)
        assert found["parameter"] == "Parameter"
        assert "parallelize" in found["records"]


@pytest.mark.parametrize("pipeline", ["none", "default"])
def test_stage_three_is_ddp(two_ranks: Pool, pipeline: str) -> None:
    for found in two_ranks.run(run_language, 3, pipeline):
        assert (found["moment"], found["parameter"]) == ("DTensor", "DTensor")


def run_tied(rank: int) -> bool:
    """Tied weights whose rows are uneven; as DDP has them, they are one parameter."""
    pair = Beside(lambda: Language(tied=True, width=256), adamw, stage=3, pipeline="default")
    pair.run(rank)
    pair.compare()
    with pair.step.full_parameters():
        assert pair.model.head.weight is pair.model.tokens.weight
        same(pair.model.head.weight.detach(), pair.reference.head.weight.detach(), "head")
    assert pair.model.head.weight is pair.model.tokens.weight
    return sharded(pair.model.head.weight)


def test_tied_weights_with_uneven_rows(two_ranks: Pool) -> None:
    assert two_ranks.run(run_tied) == [True, True]


def run_uneven(rank: int, stage: int) -> tuple[bool, int]:
    pair = Beside(Uneven, adamw, stage=stage)
    pair.run(rank)
    pair.compare()
    moment = pair.optimizer.state[pair.model.tokens.weight]["exp_avg"]
    return sharded(moment), moment.to_local().shape[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_that_no_cut_divides(two_ranks: Pool, stage: int) -> None:
    assert two_ranks.run(run_uneven, stage) == [(True, 34), (True, 33)]


def run_clipped(rank: int, stage: int) -> tuple[int, int]:
    """One all-reduce for all norms, and gathers of parameters alone; losses of the first step are
    the same bits."""
    pair = Beside(Uneven, adamw, stage=stage, step=clipped_step)
    given = next(batches(rank, 1))
    assert torch.equal(
        pair.step(pair.model, pair.optimizer, *given),
        pair.eager(pair.ddp, pair.reference_optimizer, *given),
    )
    pair.compare(1e-5)
    text = str(pair.step.graph_module.graph)
    names = ("all_reduce.default", "all_gather_into_tensor.default")
    reduced, gathered = (text.count(f"_c10d_functional.{name}") for name in names)
    return reduced, gathered


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_by_the_norm(two_ranks: Pool, stage: int) -> None:
    bias, norms = 1, 1
    once, again = 2, 1 if stage == 3 else 0  # the backward reads no weight of an embedding
    assert two_ranks.run(run_clipped, stage) == [(bias + norms, once + again)] * 2


def run_odd_stage(rank: int) -> str:
    pair = Beside(Uneven, adamw, stage=1 + 2 * rank, timeout=20.0)
    with pytest.raises(graphopt.SpmdMismatchError) as caught:
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)))
    assert not sharded(pair.model.tokens.weight)
    return str(caught.value)


def test_ranks_with_other_stages(two_ranks: Pool) -> None:
    for said in two_ranks.run(run_odd_stage):
        assert "ZeRO(stage=3" in said and "ZeRO(stage=1" in said


def test_a_group_of_one(one_rank: None) -> None:
    model = Uneven()
    step = graphopt.compile(clipped_step, parallel=graphopt.ZeRO())
    with pytest.raises(graphopt.CollectiveError, match="single rank"):
        step(model, adamw(model.parameters()), *next(batches(0, 1)))


def test_bad_stage() -> None:
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        graphopt.ZeRO(stage=4)
    for wrong in (-1, "much", True):
        with pytest.raises(graphopt.ParallelismError, match="keep_mb"):
            graphopt.ZeRO(stage=3, keep_mb=wrong)
    assert graphopt.ZeRO(stage=2) == graphopt.ZeRO(stage=1)
