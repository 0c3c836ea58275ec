"""One budget of graphs for every cause."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool, pool


def step(model: Any, optimizer: Any, x: Tensor, rows: int = 1) -> Tensor:
    loss = sum((model(x[: i + 1]).sum() for i in range(rows)), torch.zeros(()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_number_that_needs_too_many_graphs_is_named() -> None:
    run, (model, optimizer) = graphopt.compile(step, max_graphs=3), trained()
    for rows in range(1, 4):
        run(model, optimizer, torch.ones(8, 3), rows)
    before = model.weight.clone()
    with pytest.raises(graphopt.CaptureError, match="each value of argument rows") as caught:
        run(model, optimizer, torch.ones(8, 3), 4)
    assert "max_graphs=6" in str(caught.value)
    assert torch.equal(model.weight, before)
    run(model, optimizer, torch.ones(8, 3), 2)  # those that are there go on


def test_shapes_that_need_too_many_graphs_are_named() -> None:
    run, (model, optimizer) = graphopt.compile(step, max_graphs=3), trained()
    for length in (2, 3, 4):
        run(model, optimizer, torch.ones(length, 3))
    with pytest.raises(graphopt.CaptureError, match="each shape of argument x"):
        run(model, optimizer, torch.ones(5, 3))


def test_what_needs_too_many_graphs_is_not_said_to_be_the_shape() -> None:
    model = nn.Linear(4, 4)

    @graphopt.compile(max_graphs=4)
    def step(x: Tensor, name: str) -> Tensor:
        return model(x).sum() * len(name)

    for name in ("a", "ab"):
        for rows in (3, 2):
            step(torch.ones(rows, 4), name)
    with pytest.raises(graphopt.CaptureError, match="each value of argument name"):
        step(torch.ones(3, 4), "abc")


def test_lengths_that_vary_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    run, (model, optimizer) = graphopt.compile(step, pipeline="none", verify="off"), trained()
    with caplog.at_level("WARNING", "graphopt"):
        for length in range(2, 10):
            run(model, optimizer, torch.ones(length, 3))
        assert not caplog.messages
        for length in range(10, 13):
            run(model, optimizer, torch.ones(length, 3))
    (said,) = caplog.messages
    assert "8 times" in said
    assert "argument x: shape [9, 3] became [10, 3]" in said
    assert "pad the batch" in said and "bucket" in said


def test_graphs_of_other_modes_are_dropped() -> None:
    run, (model, optimizer) = graphopt.compile(step, max_graphs=2), trained()
    for momentum in range(5):
        optimizer.param_groups[0]["dampening"] = momentum / 10
        run(model, optimizer, torch.ones(8, 3))
    assert len(run.captures) == 2


def test_the_budget_is_a_positive_number() -> None:
    with pytest.raises(TypeError, match="max_graphs"):
        graphopt.compile(step, max_graphs=0)


def exhausted_on_one(rank: int) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    run, (model, optimizer) = graphopt.compile(step, max_graphs=2), trained()
    for i in range(5):
        before = model.weight.flatten().tolist()
        try:
            run(model, optimizer, torch.ones(8, 3), 1 + (i if rank else 0))
        except graphopt.GraphOptError as error:
            return f"{i}: {error}", before
    return "no error", []


@pytest.mark.full
def test_all_ranks_learn_that_one_has_used_up_its_graphs() -> None:
    with pool(2, timedelta(seconds=5)) as ranks:
        (mine, before), (theirs, after) = ranks.run(exhausted_on_one)
    assert mine.startswith("2: ")
    assert "rank 1" in mine
    assert theirs.startswith("2: ")
    assert "each value of argument rows" in theirs
    assert before == after


def exhausted_on_all(rank: int) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    run = graphopt.compile(step, max_graphs=2, fallback="eager")
    model, optimizer = trained()
    said = []
    for i in range(4):
        try:
            run(model, optimizer, torch.ones(8, 3) + rank, 1 + i)
            said.append("ran")
        except graphopt.GraphOptError as error:
            said.append(str(error))
    return said, model.weight.flatten().tolist()


def test_ranks_whose_graphs_are_used_up_do_the_same(two_ranks: Pool) -> None:
    (mine, weight), (theirs, other) = two_ranks.run(exhausted_on_all)
    assert mine[:2] == theirs[:2] == ["ran", "ran"]
    assert all("each value of argument rows" in said for said in (mine[2], theirs[2]))
    assert weight == other
