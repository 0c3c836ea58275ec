"""Wrong sharded graphs are refused, all of hundreds; right ones are accepted."""

from __future__ import annotations

import pytest

from graphopt.testing import fake_ranks
from graphopt.verify.averaged import sharing_problems
from test_zero_proof import expanded
from zero_edits import ILLEGAL, LEGAL

CASES = [("adamw fused", 1, 2), ("adamw foreach", 3, 2), ("sgd", 1, 3), ("adamw loop", 3, 3)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", ILLEGAL)
@pytest.mark.parametrize(("optimizer", "stage", "ranks"), CASES)
def test_wrong_ones_are_refused(optimizer: str, stage: int, ranks: int, edit: str) -> None:
    with fake_ranks(ranks):
        marked, gm = expanded(optimizer, stage, ranks)
        accepted = [
            what
            for what in ILLEGAL[edit](gm.graph)
            if not list(sharing_problems("sharded", marked, gm))
        ]
        assert accepted == []
        assert list(sharing_problems("sharded", marked, gm)) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", LEGAL)
@pytest.mark.parametrize(("optimizer", "stage", "ranks"), CASES)
def test_right_ones_are_accepted(optimizer: str, stage: int, ranks: int, edit: str) -> None:
    with fake_ranks(ranks):
        marked, gm = expanded(optimizer, stage, ranks)
        tried = 0
        for what in LEGAL[edit](gm.graph):
            found = [str(problem) for problem in sharing_problems("sharded", marked, gm)]
            assert found == [], what
            tried += 1
        assert tried
