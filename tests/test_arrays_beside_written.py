"""Arrays that a step goes on with behind an update in place of a tensor over another array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

Batch = tuple[Tensor, Tensor, Tensor]


class Memory:
    def __init__(self) -> None:
        chosen = np.random.default_rng(0)
        self.seen = chosen.random((30, 6), dtype=np.float32) * 255
        self.done = chosen.random((30, 4), dtype=np.float32)
        self.gain = chosen.random(30, dtype=np.float32)


def of_images(m: Memory, rows: Any) -> Batch:
    """As replay memories of images keep bytes, and scale what they sample."""
    x = torch.as_tensor(m.seen[rows].astype(np.float32))
    x.div_(255).sub_(0.5)
    return x, torch.as_tensor(m.done[rows]), torch.as_tensor(m.gain[rows] * 2)


def reshaped(m: Memory, rows: Any) -> Batch:
    x = torch.from_numpy(m.seen[rows]).mul_(2)
    done = np.concatenate([m.done[rows], m.done[rows]])[:8]
    return x, torch.from_numpy(done.reshape(8, 4)), torch.as_tensor(m.gain[rows])


def through_a_view(m: Memory, rows: Any) -> Batch:
    found = m.seen[rows]
    x, y = torch.from_numpy(found), torch.from_numpy(found[:, :4])
    x.div_(255)
    return x, y, torch.as_tensor(m.gain[rows])


def read_again(m: Memory, rows: Any) -> Batch:
    found = m.seen[rows]
    x = torch.from_numpy(found).div_(255)
    return x, torch.as_tensor(found[:, :4].copy()), torch.as_tensor(m.gain[rows])


def _trained(sample: Callable[[Memory, Any], Batch], compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    np.random.seed(0)
    model, memory = nn.Linear(6, 4), Memory()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Tensor:
        x, y, weight = sample(memory, np.random.randint(0, 30, 8))
        optimizer.zero_grad()
        loss = ((model(x) - y) * weight[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = graphopt.compile(step) if compiled else step
    losses = [run().item() for _ in range(4)]
    left = [p.tolist() for p in model.parameters()]
    return [losses, left, memory.seen.tolist(), memory.done.tolist()]


@pytest.mark.parametrize("sample", [of_images, reshaped])
def test_other_arrays_may_be_used(sample: Callable[[Memory, Any], Batch]) -> None:
    assert _trained(sample, True) == _trained(sample, False)


@pytest.mark.parametrize("sample", [through_a_view, read_again])
def test_the_array_itself_may_not(sample: Callable[[Memory, Any], Batch]) -> None:
    with pytest.raises(graphopt.CaptureError, match="in the memory of a drawn numpy array"):
        _trained(sample, True)
