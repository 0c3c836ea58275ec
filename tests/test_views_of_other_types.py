"""A step returns or keeps a view of what it is given, whose elements are read as others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

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
def test_views_of_other_types(step: Any, name: str) -> None:
    assert left_by(step, name, True) == left_by(step, name, False)
