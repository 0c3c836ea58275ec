"""`check_pass` tells rounding from mistakes: on five models, passes that change numerics are
refused where a term is wrong, and accepted where they are honest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch
from torch import fx

from graphopt.manager import Pass, PassRegistry, graph_optimization_pass
from graphopt.testing import StepUnderTest, fake_ranks
from numeric_variations import HONEST, MODELS, WRONG, Variation


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers decide here."""
    monkeypatch.setenv("GRAPHOPT_VERIFY", "off")


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


@cache
def step_of(model: str) -> StepUnderTest:
    torch.manual_seed(0)
    function, args = MODELS[model]()
    return StepUnderTest(function, args, warm=True)


def declared(variation: Variation) -> Pass:
    def varied(gm: fx.GraphModule) -> None:
        variation(gm)

    return graph_optimization_pass(registry=PassRegistry(), changes_numerics=True)(varied)


def applies(step: StepUnderTest, variation: Variation) -> bool:
    return variation(step.graph_module)


@pytest.mark.parametrize(("model", "name"), list(product(MODELS, WRONG)))
def test_wrong_numeric_pass_is_refused(model: str, name: str) -> None:
    step = step_of(model)
    if not applies(step, WRONG[name]):
        return  # the step has no such term
    with pytest.raises(AssertionError):
        step.check(declared(WRONG[name]), idempotent=False)


@pytest.mark.parametrize(("model", "name"), list(product(MODELS, HONEST)))
def test_honest_numeric_pass_is_accepted(model: str, name: str) -> None:
    step = step_of(model)
    if applies(step, HONEST[name]):
        assert step.check(declared(HONEST[name]), idempotent=False).changed


def test_there_are_enough_of_both() -> None:
    wrong, honest = (
        sum(applies(step_of(model), made) for model in MODELS for made in table.values())
        for table in (WRONG, HONEST)
    )
    assert wrong >= 60
    assert honest >= 20
