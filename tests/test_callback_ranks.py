"""Callbacks on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import graphopt
import test_callback as cases
from gloo import Pool
from twins import assert_same


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


@pytest.mark.covering(1)
@pytest.mark.full  # one of them is trained after an exception, below
@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("make", RANK_STEPS, ids=lambda make: make.__name__)
def test_as_under_ddp(two_ranks: Pool, make: Callable[..., Any], pipeline: str) -> None:
    one, other = two_ranks.run(run_both, make.__name__, pipeline)
    assert one == other > 0


class Boom(Exception):
    """Raised by a callback."""


def failing_step(where: str, fails: Callable[[], bool], only_there: bool, here: bool) -> Any:
    """A step with a callback before the backward, before the updates, or at the end."""

    def log(value: Any) -> None:
        if fails():
            raise Boom("no space left on device")

    def callback(place: str, loss: Any) -> None:
        if place == where and (here or not only_there):
            graphopt.callback(log, loss)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = cases.loss_of(model, x, y)
        callback("early", loss)
        loss.backward()
        callback("before the updates", loss)
        optimizer.step()
        callback("last", loss)
        optimizer.zero_grad()
        return loss

    return step


def run_failing(rank: int, where: str, pipeline: str, only_there: bool) -> tuple[str, str, int]:
    """The function of rank 1 raises in the fourth step. Returns what this rank got, where, and how
    often the parameters were updated."""
    torch.manual_seed(0)
    model = cases.Net([])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = iter(range(100))
    step = failing_step(where, lambda: next(calls) == 3 and rank == 1, only_there, rank == 1)
    compiled = graphopt.compile(step, pipeline=pipeline)
    error, failed = "", -1
    for number in range(8):
        try:
            compiled(model, optimizer, *cases.batch(2 * number + rank))
        except (Boom, graphopt.SpmdMismatchError) as raised:
            error, failed = f"{type(raised).__name__}: {raised}", number
            break
    compiled.flush()
    updates = int(next(iter(optimizer.state.values()))["step"])
    return error, str(failed), updates


@pytest.mark.covering(2)
@pytest.mark.parametrize("only_there", [False, True], ids=["both ranks", "rank 1 only"])
@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("where", ["early", "before the updates", "last"])
def test_an_exception_on_one_rank(
    two_ranks: Pool, where: str, pipeline: str, only_there: bool
) -> None:
    """Both ranks end within one call of the step, with the same state."""
    told, raised = two_ranks.run(run_failing, where, pipeline, only_there, timeout=60)
    assert raised[0] == "Boom: no space left on device"
    assert told[0].startswith("SpmdMismatchError") and "rank 1" in told[0]
    assert "Boom: no space left on device" in told[0]
    assert told[2] == raised[2] == (4 if where == "last" else 3)
    assert (told[1], raised[1]) == (("4", "3") if where == "last" else ("3", "3"))


def run_after_an_exception(rank: int) -> int:
    """The group works on."""
    return run_both(rank, "the_loss", "default")


@pytest.mark.full
def test_the_group_still_works_after_an_exception(two_ranks: Pool) -> None:
    two_ranks.run(run_failing, "early", "default", False, timeout=60)
    assert two_ranks.run(run_after_an_exception) == [5, 5]


def run_communicating(rank: int) -> str:
    model = cases.Net([])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = cases.loss_of(model, x, y)
        graphopt.callback(dist.all_reduce, loss)
        return cases.finish(optimizer, loss)

    with pytest.raises(graphopt.GraphOptError) as caught:
        graphopt.compile(step)(model, optimizer, *cases.batch(rank))
    return str(caught.value)


def test_a_collective_in_a_callback(two_ranks: Pool) -> None:
    for error in two_ranks.run(run_communicating):
        assert "communicates" in error and "allreduce" in error
