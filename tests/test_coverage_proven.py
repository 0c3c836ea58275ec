"""A part of the coverage set: every pass and stage proven, on one rank and several."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from cases import cases

from proven_cases import OPTIMIZERS, RANKS, Captures, group_of, judged, looping_as

NAMES = sorted(cases())

SLICE = [
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


@pytest.mark.parametrize(("name", "ranks", "optimizers"), SLICE)
def test_a_slice(name: str, ranks: int, optimizers: str) -> None:
    outcome = judged(name, cases()[name], ranks, optimizers)
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
def test_all(name: str, seed: int) -> None:
    """On each number of ranks. Several ranks share a capture with one way through the parameters,
    and one rank has another way: which, case and seed say."""
    captures, first = Captures(), NAMES.index(name) + seed
    for ranks in RANKS:
        optimizers = OPTIMIZERS[(first + (ranks > 1)) % len(OPTIMIZERS)]
        outcome = judged(name, cases()[name], ranks, optimizers, captures)
        assert outcome.verdict in ("proven", "not captured"), outcome.reason
