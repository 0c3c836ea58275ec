"""ZeRO on real ranks: the bits of DDP, with the optimizer's state in rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphopt
from gloo import Pool
from zero_cases import Beside, Language, Uneven, same, sharded


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


def test_bad_stage() -> None:
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        graphopt.ZeRO(stage=4)
    assert graphopt.ZeRO(stage=2) == graphopt.ZeRO(stage=1)
