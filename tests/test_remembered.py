"""What a step was found to use besides its arguments is there in the first trace of its next graph;
what that graph does not use is no input of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import graphopt

UPDATES, AVERAGES, OTHER = 1, 2, 3


class Program:
    """A model, an optimizer, an average, a tensor and other models, all in closures."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.average = nn.Linear(3, 2), nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.weights = torch.rand(2)
        self.others = [nn.Linear(3, 2) for _ in range(3)]

    def step(self, x: Tensor, what: int) -> Tensor:
        loss = (self.model(x) * self.weights).square().mean()
        loss.backward()
        if what:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if what == AVERAGES:
            with torch.no_grad():
                for mine, theirs in zip(
                    self.average.parameters(), self.model.parameters(), strict=True
                ):
                    mine.lerp_(theirs, 0.1)
        if what >= OTHER:
            loss = loss + self.others[what - OTHER](x).sum()
        return loss.detach()

    def left(self) -> list[Any]:
        tensors = [*self.model.parameters(), *self.average.parameters()]
        return [tensor.tolist() for tensor in tensors]


def test_the_next_graph_has_it_from_the_beginning(traces: list[int]) -> None:
    captured, eager = Program(), Program()
    step = graphopt.compile(captured.step)
    used = []
    for what in (AVERAGES, UPDATES, 0, AVERAGES, OTHER, OTHER + 1, 0):
        before, x = traces[0], torch.rand(4, 3)
        assert torch.equal(step(x, what), eager.step(x, what))
        assert captured.left() == eager.left()
        names = {name.rpartition(".")[2] for name, _ in step.captures[-1].besides.objects}
        used.append((traces[0] - before, names))
    assert used[1][1] == used[4][1] - {"others[0]"} == {"model", "optimizer"}
    assert used[2][1] == {"model"}
    numbers = [number for number, _ in used]
    assert max(numbers[1:4]) < numbers[0]
    assert "others[1]" in str(used[5][1]) and "others[0]" not in str(used[5][1])


def test_another_shape_costs_no_trace_to_find_it_again(traces: list[int]) -> None:
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), UPDATES)
    step(torch.rand(4, 3), UPDATES)
    before = traces[0]
    step(torch.rand(5, 3), UPDATES)
    assert traces[0] - before == 1  # in which nothing runs that has not been repeated


def test_what_is_remembered_is_not_kept_alive() -> None:
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), OTHER)
    gone = weakref.ref(program.others[0])
    program.others[0] = nn.Linear(3, 2)
    gc.collect()
    assert gone() is None
    step(torch.rand(4, 3), OTHER)
    step(torch.rand(4, 3), UPDATES)


def test_what_is_used_by_no_graph_can_be_anything() -> None:
    """A module that an earlier graph used, and that no graph could use any more."""
    program = Program()
    step = graphopt.compile(program.step)
    step(torch.rand(4, 3), OTHER)
    program.others[0].register_parameter("odd", nn.Parameter(torch.rand(2).to_sparse()))
    assert step(torch.rand(4, 3), UPDATES).ndim == 0
