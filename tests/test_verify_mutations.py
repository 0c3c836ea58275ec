"""Random wrong and right edits of captured steps: the former are refused, the latter are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random

import pytest

from edit_tools import Edit
from illegal_edits import ILLEGAL
from legal_edits import LEGAL, LEGAL_IN_PLACE
from mutation_trials import CASES, DIALECTS, Case, Verdict, case, trial, two_ranks

FEW = 12
MANY = 24
"""Edits of each model in each dialect, of either sort; all dialects together have every kind."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs edits that shape rules refuse
    with two_ranks():
        yield
    logger.setLevel(level)


def verdicts(of: Case, edits: dict[str, Edit], count: int, seed: object) -> list[Verdict]:
    """One kind after the other; every third time a pair. The dialects of a model share the kinds:
    each goes on where the one before it has ended."""
    draw, names = Random(str(seed)), list(edits)
    draw.shuffle(names)
    first, found = count * DIALECTS.index(of.dialect), []
    for number in range(count):
        chosen = [names[(first + number) % len(names)]]
        if number % 3 == 2:
            chosen.append(draw.choice(names))
        found.append(trial(of, [(name, edits[name]) for name in chosen], draw))
    return [verdict for verdict in found if verdict.outcome != "none"]


def all_is_well(of: Case, count: int, seed: object) -> None:
    wrong = verdicts(of, ILLEGAL, count, seed)
    assert wrong and not [v for v in wrong if v.differs or v.outcome == "crash"]
    legal = LEGAL_IN_PLACE if of.dialect == "finalized" else LEGAL
    right = verdicts(of, legal, count, seed)
    assert right and not [v for v in right if v.differs or v.outcome != "accepted"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_slice(dialect: str) -> None:
    all_is_well(case("shared-storage", "adamw-fused", dialect, trials=1), FEW, 0)


@pytest.mark.full
@pytest.mark.parametrize("names", CASES, ids="-".join)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_models(dialect: str, names: tuple[str, str], seed: int) -> None:
    all_is_well(case(*names, dialect), MANY, (seed, names))
