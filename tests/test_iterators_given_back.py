"""Steps that put the iterator from which they take a batch somewhere, as with a helper that gives
it back: `self.batches, batch = try_next(self.batches, self.loader)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import graphopt
from graphopt.errors import CaptureError


def try_next(batches: Any, loader: Any) -> tuple[Any, Tensor]:
    try:
        return batches, next(batches)
    except StopIteration:
        batches = iter(loader)
        return batches, next(batches)


class Loop:
    """A training over four batches; it may begin anew before they are all taken."""

    begins_anew = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(torch.arange(8.0)[:, None], batch_size=2)  # type: ignore[arg-type]
        self.kept: Any = None
        self.calls = 0
        self.begin()

    def begin(self) -> None:
        self.batches = iter(self.loader)

    def update(self, x: Tensor) -> tuple[float, list[float]]:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item(), x.flatten().tolist()

    def step(self) -> Any:
        raise NotImplementedError


class GivenBack(Loop):
    def step(self) -> Any:
        self.batches, x = try_next(self.batches, self.loader)
        return self.update(x)


class PutBack(Loop):
    def step(self) -> Any:
        batches = self.batches
        x = next(batches, None)
        if x is None:
            batches = iter(self.loader)
            x = next(batches)
        self.batches = batches
        return self.update(x)


class BegunAnewAtTimes(Loop):
    def step(self) -> Any:
        self.calls += 1
        if self.calls % 3 == 0:
            self.batches = iter(self.loader)
        self.batches, x = try_next(self.batches, self.loader)
        return self.update(x * self.calls)


class KeptElsewhere(Loop):
    begins_anew = True

    def step(self) -> Any:
        x = next(self.batches)
        self.kept = self.batches
        return self.update(x)


class Returned(Loop):
    begins_anew = True

    def step(self) -> Any:
        x = next(self.batches)
        return self.update(x), self.batches


class Compared(Loop):
    begins_anew = True

    def step(self) -> Any:
        before, x = self.batches, next(self.batches)
        return self.update(x), before is self.batches


class InDictionary(Loop):
    begins_anew = True

    def begin(self) -> None:
        self.kept = {"batches": iter(self.loader)}

    def step(self) -> Any:
        self.kept["batches"], x = try_next(self.kept["batches"], self.loader)
        return self.update(x)


KINDS: dict[type[Loop], int] = {
    GivenBack: 2, PutBack: 2, BegunAnewAtTimes: 3, KeptElsewhere: 5, Returned: 5, Compared: 5,
    InDictionary: 5,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_is_the_next_one(kind: type[Loop]) -> None:
    found, graphs = [], 0
    for compiled in (False, True):
        loop, rows = kind(), []
        step: Any = graphopt.compile(loop.step) if compiled else loop.step
        for index in range(13):
            if loop.begins_anew and index % 3 == 2:
                loop.begin()
            given = step()
            if kind is Returned:
                given = (given[0], given[1] is loop.batches)
            rows.append((given, loop.kept is not None and loop.kept is getattr(loop, "batches", 0)))
        found.append((rows, loop.model.weight.tolist()))
        graphs = len(step.captures) if compiled else 0
    assert found[0] == found[1]
    assert graphs <= KINDS[kind]


@pytest.mark.parametrize("of_lists", [False, True])
def test_iterators_may_change_places(of_lists: bool) -> None:
    found = []
    for compiled in (False, True):
        loop = Loop()
        if of_lists:
            loop.batches = iter([torch.ones(2, 1) * index for index in range(9)])
        loop.kept = iter(loop.loader)

        def step(loop: Any = loop) -> Any:
            x = next(loop.batches)
            loop.batches, loop.kept = loop.kept, loop.batches
            return loop.update(x)

        run: Any = graphopt.compile(step) if compiled else step
        given = [run() for _ in range(7)]
        found.append((given, [x.tolist() for x in loop.batches], [x.tolist() for x in loop.kept]))
    assert found[0] == found[1]


class OwnOptimizer(nn.Module):
    """Makes an optimizer in the middle of the training, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.register_buffer("calls", torch.tensor([0]))

    def step(self, x: Tensor) -> float:
        loss = self.net(x).square().mean()
        if self.calls == 2:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.calls += 1
        return loss.item()


def test_an_optimizer_that_a_step_makes_and_keeps_is_refused_at_once() -> None:
    algorithm = OwnOptimizer()
    step: Any = graphopt.compile(algorithm.step)
    for _ in range(2):
        step(torch.ones(2, 3))
    weight = algorithm.net.weight.tolist()
    with pytest.raises(CaptureError, match=r"puts a Adam .* into optimizer"):
        step(torch.ones(2, 3))
    assert algorithm.net.weight.tolist() == weight
