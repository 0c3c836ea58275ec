"""Operators that write to what they read, and views whose elements are read as others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda t: torch.view_as_complex(t.view(-1, 2)),
    "real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(-1, 2))),
    "conjugated": lambda t: torch.view_as_complex(t.view(-1, 2)).conj(),
    "imaginary": lambda t: torch.view_as_complex(t.view(-1, 2)).imag,
    "negated": lambda t: torch.view_as_complex(t.view(-1, 2)).conj().imag,
    "integers": lambda t: t.view(torch.int32),
    "shorter": lambda t: t.view(torch.int16),
    "longer": lambda t: t.view(torch.float64)[1:],
    "bytes": lambda t: t.view(torch.uint8)[3:9],
    "of a part": lambda t: t[1:].view(torch.int32)[1:],
}


def returned(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return view(x), x


def kept(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    s.kept = view(x)
    return s.kept, x


def of_weight(view: Callable[[Tensor], Tensor], s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return view(s.model.weight.detach().view(-1)), s.model.weight


def left_by(step: Any, name: str, compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    s = SimpleNamespace(model=nn.Linear(4, 4), kept=None)
    run = graphopt.compile(step, pipeline="none") if compiled else step
    left = []
    for _ in range(2):
        view, base = run(VIEWS[name], s, torch.randn(16))
        shares = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        flags = view.is_conj(), view.is_neg(), shares
        values = view.resolve_conj().resolve_neg().contiguous().view(torch.uint8).tolist()
        left.append((view.dtype, view.shape, view.stride(), view.storage_offset(), flags, values))
    return left


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("step", [returned, kept, of_weight])
def test_overlapping_writes(step: Any, name: str) -> None:
    assert left_by(step, name, True) == left_by(step, name, False)
