"""Tuples with tensors in objects among the arguments, as batches keep them: one graph for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Batch:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pair, self.named = (x, y), Pair(x, y)
        self.nest, self.mixed = ((x, y), y * 2), (x, None, 3, y)
        self.rows = [(x, y), (y, x)]
        self.table = {"pair": (x, y)}


def unpacked(batch: Batch) -> Any:
    x, y = batch.pair
    return x, y


def named(batch: Batch) -> Any:
    return batch.named.x, batch.named[1]


def nested(batch: Batch) -> Any:
    return batch.nest[0][0], batch.nest[1]


def mixed(batch: Batch) -> Any:
    assert batch.mixed[1] is None
    return batch.mixed[0] * batch.mixed[2], batch.mixed[-1]


def in_a_list(batch: Batch) -> Any:
    return batch.rows[0]


def in_a_table(batch: Batch) -> Any:
    return [tensor * 1 for tensor in batch.table["pair"]]


def put_anew(batch: Batch) -> Any:
    batch.pair = (batch.pair[0] * 2, batch.pair[1])
    batch.named = batch.named._replace(x=batch.pair[0])
    return batch.pair


WAYS: list[Callable[[Batch], Any]] = [
    unpacked,
    named,
    nested,
    mixed,
    in_a_list,
    in_a_table,
    put_anew,
]


def _trained(way: Callable[[Batch], Any], compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Batch) -> Tensor:
        x, y = way(batch)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = graphopt.compile(step) if compiled else step
    left = []
    for _ in range(4):
        batch = Batch(torch.rand(5, 3), torch.rand(5, 2))
        left.append([run(batch).item(), str(batch.pair), str(batch.named)])
    left.append([p.tolist() for p in model.parameters()])
    return left, len(run.captures) if isinstance(run, graphopt.TrainStep) else 1


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_tuples_are_inputs(way: Callable[[Batch], Any]) -> None:
    left, graphs = _trained(way, True)
    assert left == _trained(way, False)[0]
    assert graphs == 1


def test_tuples_of_another_structure_have_a_graph_of_their_own() -> None:
    model = nn.Linear(3, 2)
    step = graphopt.compile(lambda batch: sum(model(x).sum() for x in batch.pair))
    for _ in range(2):
        for count in (1, 2):
            batch = Batch(torch.rand(5, 3), torch.rand(5, 3))
            batch.pair = batch.pair[:count]  # type: ignore[assignment]
            assert torch.equal(step(batch), sum(model(x).sum() for x in batch.pair))
    assert len(step.captures) == 2


def test_a_constant_in_a_tuple_is_one_that_a_graph_holds_for() -> None:
    step = graphopt.compile(lambda batch: batch.mixed[0] * batch.mixed[2])
    for factor in (3, 4, 3):
        batch = Batch(torch.rand(5, 3), torch.rand(5, 2))
        batch.mixed = (batch.mixed[0], None, factor, batch.mixed[3])
        assert torch.equal(step(batch), batch.mixed[0] * factor)
