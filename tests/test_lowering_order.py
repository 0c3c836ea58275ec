"""Compiled code that adds where indices say gives the same bits in every call, on many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphopt import _compat
from graphopt.lowering import LoweredSubgraph, partial_lower

ROWS, ROW, ADDED = 7, 64, 4096


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # they take turns where there are fewer cores
    yield
    torch.set_num_threads(before)


def embedding(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS, ROW, requires_grad=True)
    looked_up = F.embedding(indices, zeros)
    return torch.autograd.grad((looked_up * values.sin()).sum(), zeros)[0]


def padded_embedding(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS, ROW, requires_grad=True)
    looked_up = F.embedding(indices, zeros, padding_idx=3, scale_grad_by_freq=True)
    return torch.autograd.grad((looked_up * values.sin()).sum(), zeros)[0]


def index_add(values: Tensor, indices: Tensor) -> Tensor:
    return values.new_zeros(ROWS, ROW).index_add(0, indices, values.sin(), alpha=0.5)


def index_mean(values: Tensor, indices: Tensor) -> Tensor:
    return values.new_ones(ROWS, ROW).index_reduce(0, indices, values.sin(), "mean")


def index_put(values: Tensor, indices: Tensor) -> Tensor:
    # So small that ATen adds in order.
    few = values[:256].sin()
    return values.new_zeros(ROWS, ROW).index_put((indices[:256],), few, accumulate=True)


def selected(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS, ROW, requires_grad=True)
    return torch.autograd.grad((zeros.index_select(0, indices) * values.sin()).sum(), zeros)[0]


def gathered(values: Tensor, indices: Tensor) -> Tensor:
    zeros = values.new_zeros(ROWS, ROW, requires_grad=True)
    taken = zeros.gather(0, indices[:, None].expand(-1, ROW))
    return torch.autograd.grad((taken * values.sin()).sum(), zeros)[0]


def scattered(values: Tensor, indices: Tensor) -> Tensor:
    places = indices[:, None].expand(-1, ROW)
    return values.new_zeros(ROWS, ROW).scatter_reduce(0, places, values.sin(), "sum")


def windows(values: Tensor, indices: Tensor) -> Tensor:
    flat = values.new_zeros(ADDED + 8, requires_grad=True)
    seen = flat.unfold(0, 9, 1)[:ADDED]
    return torch.autograd.grad((seen * values[:, :9].sin()).sum(), flat)[0]


def folded(values: Tensor, indices: Tensor) -> Tensor:
    columns = values.sin().reshape(1, 64, 64 * 64)
    return F.fold(columns, output_size=(67, 67), kernel_size=4)


FUNCTIONS = [
    *(embedding, padded_embedding, index_add, index_mean, index_put, selected, gathered),
    *(scattered, windows, folded),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function.__name__))
def test_adds_in_one_order(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ADDED, ROW, generator=generator)
    indices = torch.randint(ROWS, (ADDED,), generator=generator)
    gm = partial_lower(_compat.make_fx(function)(values, indices), min_ops=1)
    first = gm(values, indices)
    for _ in range(40):
        assert torch.equal(gm(values, indices), first)
    assert any(isinstance(m, LoweredSubgraph) and m.is_compiled for m in gm.modules())
    torch.testing.assert_close(first, function(values, indices), rtol=1e-4, atol=1e-4)
