"""A part of the coverage set: loops as people publish them, captured and equal to eager."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from cases import cases
from coverage import judged

SLICE = [
    "adversarial.diffusion_closed_over",
    "language.accumulation_by_batch_index",
    "language.mixture_of_experts",
    "optimizers.adam_with_python_count",
    "optimizers.lookahead",
    "randomness.gan_with_noise_of_numpy",
    "randomness.mixup_inside",
    "randomness.running_loss_as_float",
    "reinforcement.maml",
    "styles.mask_through_layers",
    "styles.tensors_from_numbers",
    "styles.trainer_method",
    "trainers.cycle_gan",
    "vision.focal_loss",
]


@pytest.mark.parametrize("name", SLICE)
def test_captured_and_equal_to_eager(name: str) -> None:
    outcome = judged(name, cases()[name])
    assert (outcome.verdict, outcome.reason) == ("bitwise", "")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(cases().keys() - set(SLICE)))
def test_nothing_is_captured_wrongly(name: str) -> None:
    assert judged(name, cases()[name]).verdict in ("bitwise", "refused")
