"""Random programs with sizes and branches of a rank's own, on real ranks: the bits of
DistributedDataParallel(find_unused_parameters=True), or an error on all ranks in the same call
after which they may go on; and never a rank that waits for another."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool
from random_own_decisions import BranchError, RandomProgram, left

CALLS = 4
PIPELINES = ["none", "default"]


def expected_of(program: RandomProgram, rank: int, ranks: int) -> list[list[Tensor]]:
    """By DistributedDataParallel, what each call gives and leaves."""
    model = program.model()
    bucket = 1e-6 if ranks > 2 else 25
    net = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=bucket)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    step = program.step(model, net, optimizer)
    batches = program.batches(rank, CALLS)
    return [[step(x), *left(model, optimizer)] for x in batches]


def outcome(
    rank: int, ranks: int, seed: int, pipeline: str, verify: str | None = None
) -> dict[str, Any]:
    """How a program went on one rank.

    Returns:
        `calls`: of each call, "equal" or "different", or the text of an error; `seconds`: how long
        calls took that raised.
    """
    program = RandomProgram(seed)
    calls: list[str] = []
    seconds: list[float] = []
    wanted = None if program.may_be_refused else expected_of(program, rank, ranks)
    model = program.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    step: Any = graphopt.compile(
        program.step(model, model, optimizer), pipeline=pipeline, verify=verify
    )
    for number, x in enumerate(program.batches(rank, CALLS)):
        before, start = left(model, optimizer), time.monotonic()
        try:
            loss = step(x)
        except (graphopt.GraphOptError, BranchError) as error:
            seconds.append(time.monotonic() - start)
            calls.append(f"{type(error).__name__}: {error}")
            unchanged = all(map(torch.equal, before, left(model, optimizer)))
            if number and not unchanged:  # the first call creates what was not there
                calls[-1] = f"changed, and raised {calls[-1]}"
            continue
        found = [loss, *left(model, optimizer)]
        same = wanted is None or all(map(torch.equal, found, wanted[number]))
        calls.append("equal" if same else "different")
    return {"program": str(program), "calls": calls, "seconds": seconds}


def check(outcomes: list[dict[str, Any]]) -> None:
    """Each call of a program is right on all ranks, or ends with an error on all of them."""
    for of_call in zip(*(each["calls"] for each in outcomes), strict=True):
        failed = [text for text in of_call if text != "equal"]
        assert "different" not in failed, outcomes
        assert not any(text.startswith("changed") for text in failed), outcomes
        assert len(failed) in (0, len(outcomes)), outcomes
        assert not failed or RandomProgram(int(outcomes[0]["program"].split(":")[0])).may_be_refused


SLICE = [0, 1, 4, 6, 8, 10, 46, 78, 431]


@pytest.mark.parametrize("seed", SLICE)
def test_random_programs_on_two_ranks(two_ranks: Pool, seed: int) -> None:
    check(two_ranks.run(outcome, 2, seed, PIPELINES[seed % 2], timeout=600.0))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_random_programs_on_two_ranks(two_ranks: Pool, seed: int) -> None:
    check(two_ranks.run(outcome, 2, seed, PIPELINES[seed % 2], timeout=600.0))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_random_programs_on_three_ranks(three_ranks: Pool, seed: int) -> None:
    check(three_ranks.run(outcome, 3, seed, "none", timeout=600.0))
