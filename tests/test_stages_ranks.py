"""Ranks agree on the plan before anything is compiled."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import graphopt
from gloo import Pool
from graphopt.lowering.stages import Lower
from graphopt.ranks.meeting import Meeting
from graphopt.stages import entries
from zoo import MODELS, train_step

TIMEOUT = 2.0


def train(rank: int, fails: bool = False) -> tuple[list[str], list[torch.Tensor]]:
    """What happens in which order while rank 1 compiles for longer than ranks wait."""
    seen: list[str] = []
    exchange, lower, finalize = Meeting.exchange, Lower.apply, entries.finalize

    def noting(self: Meeting, mine: dict[str, Any], **options: Any) -> Any:
        seen.append("/".join(mine))
        return exchange(self, mine, **options)

    def compiling(self: Lower, *args: Any) -> Any:
        seen.append("lower")
        if rank == 1:
            time.sleep(TIMEOUT * 2)
            if fails:
                raise graphopt.LoweringError("the compiler is broken")
        return lower(self, *args)

    Meeting.exchange, Lower.apply = noting, compiling  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        model = MODELS["mlp"].make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = graphopt.DataParallel(timeout=TIMEOUT)
        step = graphopt.compile(train_step, lower="inductor", parallel=parallel)
        step(model, optimizer, *MODELS["mlp"].batch(rank))
        step.flush()
        return seen, [p.detach().clone() for p in model.parameters()]
    finally:
        Meeting.exchange, Lower.apply = exchange, lower  # type: ignore[method-assign]
        entries.finalize = finalize


@pytest.mark.full
def test_a_slow_compiler_is_waited_for(two_ranks: Pool) -> None:
    (first, parameters), (second, others) = two_ranks.run(train)
    assert first == second
    agreed = next(place for place, seen in enumerate(first) if seen.startswith("plans/"))
    assert agreed < first.index("lower") < first.index("ready")
    assert all(map(torch.equal, parameters, others))


def test_a_compiler_that_fails_is_told_to_all(two_ranks: Pool) -> None:
    with pytest.raises(Exception, match=r"stage 'lower' of 'setup' raised|could not capture"):
        two_ranks.run(train, True)
