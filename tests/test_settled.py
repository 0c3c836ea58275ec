"""A graph is traced twice where its step does something that no trace has been seen to repeat,
and once where it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt import CaptureError
from graphopt.tracing.settled import NOTHING_SETTLED, SettledTraces


def _program(seen: Any) -> Callable[..., Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, more: int = 0) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if more == 1:
            loss = loss * torch.tanh(loss)
        if more == 2:
            loss = loss * seen()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_only_what_is_new_is_traced_twice(traces: list[int]) -> None:
    captured, eager = graphopt.compile(_program(float)), _program(float)
    needed = []
    for rows, more in [(4, 0), (5, 0), (4, 1), (5, 1), (6, 1), (6, 0), (4, 2), (5, 2)]:
        before, x = traces[0], torch.rand(rows, 3)
        assert torch.equal(captured(x, more), eager(x, more))
        needed.append(traces[0] - before)
    assert needed == [2, 1, 2, 1, 1, 1, 2, 1]


def test_what_changes_unseen_in_a_new_branch_is_refused() -> None:
    """How much memory Python has is a number of the interpreter's, which nobody follows."""
    step = graphopt.compile(_program(lambda: float(sys.getallocatedblocks())))
    step(torch.rand(4, 3))
    step(torch.rand(5, 3), 1)
    with pytest.raises(CaptureError, match="two traces of it differ"):
        step(torch.rand(4, 3), 2)


def test_nothing_is_settled_by_nothing() -> None:
    captured = graphopt.capture(lambda m, x: m(x), nn.Linear(3, 2), torch.ones(4, 3))
    assert captured.executed
    known = SettledTraces.by([captured])
    assert known.fingerprints == {captured.fingerprint}
    assert known.executed.keys() == captured.executed.keys()
    assert not NOTHING_SETTLED.fingerprints and not NOTHING_SETTLED.executed
