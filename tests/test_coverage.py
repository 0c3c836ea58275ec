"""A part of the coverage set: loops as people publish them, captured and equal to eager; every pass
and stage proven, on one rank and several."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from cases import cases, cured_cases, refusals
from coverage import judged

import proven_cases
from proven_cases import OPTIMIZERS, RANKS, Captures, group_of, looping_as

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


NAMES = sorted(cases())

PROVEN = [
    ("adversarial.diffusion_closed_over", 2, "loop"),
    ("optimizers.lookahead", 4, "foreach"),
    ("vision.focal_loss", 1, "fused"),
]


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    logger = logging.getLogger("graphopt")
    before = logger.level, logger.propagate
    yield
    logger.level, logger.propagate = before


@pytest.mark.parametrize(("name", "ranks", "optimizers"), PROVEN)
def test_stages_are_proven(name: str, ranks: int, optimizers: str) -> None:
    outcome = proven_cases.judged(name, cases()[name], ranks, optimizers)
    assert (outcome.verdict, outcome.reason) == ("proven", "")
    assert outcome.stages >= 2


@pytest.mark.parametrize(
    "name", ["optimizers.lookahead", pytest.param("vision.focal_loss", marks=pytest.mark.full)]
)
def test_a_capture_says_of_other_ranks_how_many_there_are_alone(name: str) -> None:
    """So that one serves for every number of them."""
    shared, texts = Captures(), []
    for ranks, captures in ((2, shared), (4, shared), (4, Captures())):
        with group_of(ranks), looping_as("foreach"):
            graph = captures.step(cases()[name], ranks, "foreach").graph_module.graph
            texts.append(str(graph))
    assert texts[0] != texts[1] == texts[2]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_stages_of_all_cases_are_proven(name: str, seed: int) -> None:
    """On each number of ranks. Several ranks share a capture with one way through the parameters,
    and one rank has another way: which, case and seed say."""
    captures, first = Captures(), NAMES.index(name) + seed
    for ranks in RANKS:
        optimizers = OPTIMIZERS[(first + (ranks > 1)) % len(OPTIMIZERS)]
        outcome = proven_cases.judged(name, cases()[name], ranks, optimizers, captures)
        assert outcome.verdict in ("proven", "not captured"), outcome.reason
