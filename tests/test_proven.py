"""A part of the coverage set: every pass and stage proven, on one rank and several."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from cases import cases
from proven import OPTIMIZERS, RANKS, judged

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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases()))
def test_all(name: str) -> None:
    for ranks in RANKS:
        settled: set[str] = set()
        for optimizers in OPTIMIZERS:
            outcome = judged(name, cases()[name], ranks, optimizers, settled)
            assert outcome.verdict in ("proven", "not captured", "failed"), outcome.reason
