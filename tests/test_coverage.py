"""A part of the coverage set: loops as people publish them, captured and equal to eager."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from cases import cases, cured_cases, refusals
from coverage import judged

SLICE = [
    "adversarial.diffusion_closed_over",
    "language.accumulation_by_batch_index",
    "language.mixture_of_experts",
    "optimizers.adam_with_python_count",
    "optimizers.lookahead",
    "randomness.running_loss_as_float",
    "reinforcement.maml",
    "styles.mask_through_layers",
    "styles.tensors_from_numbers",
    "styles.trainer_method",
    "trainers.cycle_gan",
    "vision.focal_loss",
]


UNCURED = ("optimizers.lbfgs", "optimizers.sparse_adam")
"""Loops whose optimizer goes by values of tensors in its own code."""


@pytest.mark.parametrize("name", SLICE)
def test_captured_and_equal_to_eager(name: str) -> None:
    outcome = judged(name, cases()[name])
    assert (outcome.verdict, outcome.reason) == ("bitwise", "")


@pytest.mark.parametrize("name", sorted(refusals()))
def test_refused_for_its_reason_and_captured_once_it_is_cured(name: str) -> None:
    outcome = judged(name, cases()[name])
    assert outcome.verdict == "refused"
    assert refusals()[name] in outcome.reason
    assert Path(sys.modules[cases()[name].__module__].__file__ or "").name in outcome.reason
    cured = judged(name, cured_cases()[name])
    assert (cured.verdict, cured.reason) == ("bitwise", "")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(cases().keys() - set(SLICE) - refusals().keys()))
def test_the_others_are_captured_as_well(name: str) -> None:
    assert judged(name, cases()[name]).verdict == ("refused" if name in UNCURED else "bitwise")
