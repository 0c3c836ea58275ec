"""Arrays outside a step that it reads, draws by, and then changes by what the graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from tests.test_in_graph import shown_as

COUNT = 16


class Replay:
    """As prioritized replay is written: what was surprising is drawn more often."""

    def __init__(self) -> None:
        numbers = np.random.RandomState(1)
        self.buffer = [
            (numbers.randn(1, 4).astype(np.float32), numbers.randint(2), float(numbers.randn()))
            for _ in range(COUNT)
        ]
        self.priorities = numbers.rand(COUNT).astype(np.float32)

    def sample(self, size: int, beta: float) -> Any:
        probabilities = self.priorities**0.6
        probabilities /= probabilities.sum()
        indices = np.random.choice(len(self.buffer), size, p=probabilities)
        states, actions, rewards = zip(*[self.buffer[index] for index in indices], strict=True)
        weights = (len(self.buffer) * probabilities[indices]) ** (-beta)
        weights /= weights.max()
        return np.concatenate(states), actions, rewards, indices, np.array(weights, np.float32)

    def one_by_one(self, indices: Any, priorities: Any) -> None:
        for index, priority in zip(indices, priorities, strict=True):
            self.priorities[index] = priority

    def at_once(self, indices: Any, priorities: Any) -> None:
        self.priorities[indices] = priorities

    def added(self, indices: Any, priorities: Any) -> None:
        self.priorities[indices] += priorities
        self.priorities[0] = priorities.max()


Update = Callable[[Replay, Any, Any], None]


def trained(update: Update, compiled: bool, between: Callable[[Replay], Any]) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    model, replay = nn.Linear(4, 2), Replay()
    optimizer = torch.optim.Adam(model.parameters())

    def step(beta: float) -> Tensor:
        states, actions, rewards, indices, weights = replay.sample(8, beta)
        chosen = torch.LongTensor(actions).unsqueeze(1)
        scores = model(torch.FloatTensor(states)).gather(1, chosen).squeeze(1)
        losses = (scores - torch.FloatTensor(rewards)).pow(2) * torch.FloatTensor(weights)
        optimizer.zero_grad()
        losses.mean().backward()
        update(replay, indices, (losses + 1e-5).detach().cpu().numpy())
        optimizer.step()
        return losses.mean()

    used: Any = graphopt.compile(step) if compiled else step
    seen: list[Any] = []
    for call in range(5):
        seen += [used(0.4 + 0.1 * call), replay.priorities.copy(), np.random.get_state()[1]]
        seen += [p.detach().clone() for p in model.parameters()]
        between(replay)
    return shown_as(seen), used


def made_anew(replay: Replay) -> None:
    replay.priorities = replay.priorities * 1.1


@pytest.mark.parametrize("between", [lambda replay: None, made_anew], ids=["same", "made anew"])
@pytest.mark.parametrize("update", [Replay.one_by_one, Replay.at_once, Replay.added])
def test_priorities_are_as_in_eager_code(update: Update, between: Callable[[Replay], None]) -> None:
    expected, _ = trained(update, compiled=False, between=between)
    found, step = trained(update, compiled=True, between=between)
    assert found == expected
    assert len(step.captures) == 1


def read_behind(replay: Replay, indices: Any, priorities: Any) -> None:
    replay.priorities[indices] = priorities
    np.random.choice(COUNT, 2, p=replay.priorities / replay.priorities.sum())


def read_through_a_view(replay: Replay, indices: Any, priorities: Any) -> None:
    view = replay.priorities[2:]
    replay.priorities[indices] = priorities
    torch.from_numpy(view * 2)


@pytest.mark.parametrize("update", [read_behind, read_through_a_view])
def test_what_is_read_behind_is_refused(update: Update) -> None:
    with pytest.raises(CaptureError, match="behind a line that changes it"):
        trained(update, compiled=True, between=lambda replay: None)


RATES = np.linspace(0.1, 0.01, 12)


@pytest.mark.parametrize("begin", [0, 4])
def test_rates_of_a_table_may_be_scaled(begin: int) -> None:
    """As ConvNeXt, BEiT and others set them for each layer."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, index: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = RATES[begin + index // 2] * group["lr_scale"]
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    found = []
    for wrapped in (step, graphopt.compile(step)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr_scale"] = 0.5
        seen: list[Any] = []
        for index, x in enumerate(torch.randn(5, 3, 4)):
            seen += [wrapped(model, optimizer, x, index), optimizer.param_groups[0]["lr"]]
        found.append(shown_as([*seen, model.weight]))
    assert found[0] == found[1]
    assert len(wrapped.captures) == 1
