"""What views of fake tensors give without the dispatch of their mode is what they give with it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphopt import _compat
from graphopt.errors import VerificationError
from graphopt.graph_utils import call_function_with_meta, evaluate

aten = torch.ops.aten
VIEW, SPLIT = aten.view.default, aten.split_with_sizes.default


def graph_of(real: Tensor, *, inside: bool = False) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    node = graph.placeholder("x")
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(real, static_shapes=True)
    node.meta["val"] = fake[2:] if inside else fake
    return graph, node


def facts(value: Any) -> list[Any]:
    tensors: list[Tensor] = [value] if isinstance(value, Tensor) else list(value)
    return [
        (
            type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad,
            t.is_conj(), t.is_neg(), t.fake_mode, _compat.storage_key(t),
        )  # type: ignore[attr-defined]
        for t in tensors
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "sizes"),
    [(VIEW, [4, 3]), (VIEW, [2, -1]), (VIEW, [12]), (SPLIT, [5, 0, 7]), (SPLIT, [12])],
    ids=str,
)
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("conj", [False, True], ids=["plain", "conj"])
def test_views_are_those_of_the_mode(
    target: Any, sizes: list[int], inside: bool, dtype: torch.dtype, conj: bool
) -> None:
    real = torch.zeros(14 if inside else 12, dtype=dtype)
    if dtype.is_floating_point:
        real.requires_grad_()
    graph, node = graph_of(real.conj() if conj else real, inside=inside)
    new = call_function_with_meta(graph, target, (node, sizes))
    held = new.meta["val"]
    assert facts(held) == facts(evaluate(target, (node, sizes), {}))
    assert all(t is not node.meta["val"] for t in ([held] if isinstance(held, Tensor) else held))


@pytest.mark.parametrize(
    ("target", "args"),
    [(VIEW, ([5, 3],)), (SPLIT, ([5, 5],)), (VIEW, ()), (VIEW, (12.0,)), (SPLIT, ([12], 4))],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(target: Any, args: tuple[Any, ...]) -> None:
    graph, node = graph_of(torch.zeros(12))
    with pytest.raises(VerificationError, match="does not take these arguments"):
        call_function_with_meta(graph, target, (node, *args))
    assert [n.op for n in graph.nodes] == ["placeholder"]


def test_the_mode_decides_where_sizes_are_symbolic() -> None:
    graph, node = graph_of(torch.zeros(12))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    node.meta["val"] = mode.from_tensor(torch.zeros(7), static_shapes=False)
    new = call_function_with_meta(graph, VIEW, (node, [-1, 1]))
    assert isinstance(new.meta["val"].shape[0], torch.SymInt)


@pytest.mark.parametrize(
    "real",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3, 4).t()),
        torch.zeros(6, dtype=torch.complex64).conj(),
        torch.zeros(0, 2),
        torch.zeros(4)[1::2],
        torch.zeros(3, 3).to_sparse(),
    ],
    ids=["plain", "leaf", "parameter", "conj", "empty", "inside", "sparse"],
)
@pytest.mark.parametrize("active", [False, True], ids=["outside its mode", "in its mode"])
def test_what_is_detached_is_what_the_mode_detaches(real: Tensor, active: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(real, static_shapes=True)
    with mode if active else nullcontext():
        ours, theirs = _compat.detached(fake), fake.detach()
    if real.is_sparse:
        assert ours.is_sparse and ours.shape == theirs.shape
    else:
        assert facts(ours) == facts(theirs)
        assert ours is not fake and ours.is_leaf


def test_what_is_detached_keeps_a_value_that_is_known() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        known = torch.tensor(2.5)
        assert _compat.detached(known).item() == 2.5
