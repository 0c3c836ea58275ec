"""ZeRO beside DDP in many settings, bit for bit."""

from __future__ import annotations

import pytest

import graphopt
from gloo import Pool
from zero_cases import Beside, Uneven, batches
from zero_settings import FUSED, SETTINGS, accumulating, run_accumulated, run_setting


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [1, 3])
def test_bits_of_ddp(two_ranks: Pool, stage: int, name: str) -> None:
    two_ranks.run(run_setting, name, stage)


@pytest.mark.parametrize("build", ["language", "uneven"])
def test_accumulated_gradients(two_ranks: Pool, build: str) -> None:
    two_ranks.run(run_accumulated, 1, build)


def run_refused(rank: int) -> str:
    pair = Beside(Uneven, FUSED, accumulating, 3)
    with pytest.raises(graphopt.CaptureError) as caught, pair.step.no_sync():
        pair.step(pair.model, pair.optimizer, *next(batches(rank, 1)), False)
    return str(caught.value)


def test_accumulation_over_calls_needs_whole_parameters(two_ranks: Pool) -> None:
    for said in two_ranks.run(run_refused):
        assert "stage=1" in said
