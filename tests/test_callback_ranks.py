"""Callbacks on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import graphopt
import test_callback as cases
from gloo import Pool, pool
from twins import assert_same


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with pool(2) as ranks:
        yield ranks


def run_both(rank: int, name: str, pipeline: str, steps: int = 5) -> int:
    """Against DistributedDataParallel; returns how many values were compared."""
    results = []
    for options in ({}, {"pipeline": pipeline}):
        torch.manual_seed(0)
        seen: list[Any] = []
        model: Any = cases.Net(seen)
        step = getattr(cases, name)(seen)
        wrapped = model if options else _wrapped(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        called = graphopt.compile(step, **options) if options else step
        for number in range(steps):
            called(wrapped, optimizer, *cases.batch(2 * number + rank))
        results.append((seen, model.state_dict()))
    assert_same(results[1], results[0], name)
    return len(results[0][0])


def _wrapped(model: torch.nn.Module) -> torch.nn.Module:
    class Wrapped(DistributedDataParallel):
        """With the attributes of the model."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.named_parameters(*args, **kwargs)

    return Wrapped(model)


RANK_STEPS = [
    cases.the_loss,
    cases.a_number,
    cases.several,
    cases.one_parameter_after,
    cases.a_loop,
]


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("make", RANK_STEPS, ids=lambda make: make.__name__)
def test_as_under_ddp(two_ranks: Pool, make: Callable[..., Any], pipeline: str) -> None:
    one, other = two_ranks.run(run_both, make.__name__, pipeline)
    assert one == other > 0
