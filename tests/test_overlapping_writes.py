"""Operators that write to what they read elsewhere in memory, or to elements that are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt


def left(statement: str, compiled: bool) -> Any:
    """What three calls leave in a tensor outside, and one that is viewed; or the error's class."""
    torch.manual_seed(0)
    a = torch.randn(6, 6)
    held = {"a": a, "t": a.t(), "torch": torch}
    space: dict[str, Any] = {}
    exec(f"def change(a, t, torch):\n    {statement}", space)  # the statements are those below

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            space["change"](**held)
        return x * a.sum()

    called = graphopt.compile(step, pipeline="none") if compiled else step
    try:
        results = [called(torch.ones(2)).tolist() for _ in range(3)]
    except (RuntimeError, graphopt.CaptureError) as error:
        return error
    return results, a.tolist()


@pytest.mark.parametrize(
    "statement",
    [
        "a[:, :-1] = a[:, 1:]",
        "a[:, :-2].add_(a[:, 2:])",
        "a[:3].copy_(a[3:])",
        "a.add_(a)",
        "a[::2].mul_(a[1::2])",
        "a.masked_fill_(t > 0, a[0, 0])",
        "a.fill_(a[1, 1])",
        "a.copy_(a.flip(0))",
        "torch._foreach_add_([a[0], a[1]], [a[2], a[3]])",
        "t[1:].zero_()",
    ],
)
def test_eager_code_reads_all_before_it_writes(statement: str) -> None:
    expected = left(statement, compiled=False)
    assert isinstance(expected, tuple)
    assert left(statement, compiled=True) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "a.add_(t)",
        "a.copy_(t)",
        "a[1:] = a[:-1]",
        "a.div_(a[0, 0])",
        "torch.mul(a, t, out=a)",
        "torch._foreach_copy_([a], [t])",
        "a.index_copy_(0, torch.tensor([0, 1]), a[1:3])",
        "a[:1].expand(3, 6)[:] = torch.ones(3, 6)",
        "a[0].expand(3, 6).fill_(a[1, 1])",
    ],
)
def test_what_eager_code_refuses_is_refused(statement: str) -> None:
    assert isinstance(left(statement, compiled=False), RuntimeError)
    refused = left(statement, compiled=True)
    assert isinstance(refused, graphopt.CaptureError)
    assert "of which it reads another part" in str(refused) or "expanded" in str(refused)


@pytest.mark.parametrize(
    "statement",
    [
        "a[:, 1:].copy_(a[:, :-1])",  # eager writes the first column into all others
        "a[0].expand(3, 6)[1] = 0.1",  # a graph would add to what is there
        "a[:1].expand(3, 6).zero_()",
        "a[:, :1].expand(6, 3).fill_(2.0)",
    ],
)
def test_what_a_graph_cannot_do_exactly_is_refused(statement: str) -> None:
    assert isinstance(left(statement, compiled=False), tuple)
    assert isinstance(left(statement, compiled=True), graphopt.CaptureError)
