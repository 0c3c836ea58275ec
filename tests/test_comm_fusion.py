"""Buckets of all-reduces: which, where, and the same bits."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import (
    find_all_descendants,
    find_nodes,
    get_outputs,
    is_collective,
    is_operator,
)
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import comm_fusion_with_concat
from graphopt.testing import check_pass
from graphs import inputs_of, training_step
from sketch import Sketch, bucket_sizes, fused, gradients, one_rank, targets
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten
KB = 1024


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def test_golden() -> None:
    check_pass(
        gradients((16,), (2, 8), (3,)),
        [torch.ones(16), torch.ones(2, 8), torch.ones(3)],
        comm_fusion_with_concat,
        changes=3,
        expect="""
        ── inputs ──
        %g0  f32[16]
        %g1  f32[2, 8]
        %g2  f32[3]
        ── forward ──
        %neg_default = aten.neg.default(%g0)  f32[16]
        %neg_default_1 = aten.neg.default(%g1)  f32[2, 8]
        %neg_default_2 = aten.neg.default(%g2)  f32[3]
        ── communication ──
        %view_default = aten.view.default(%neg_default_1, [16])  f32[16]
        %cat_default = aten.cat.default([%neg_default, %view_default, %neg_default_2])  f32[35]
        %mul_tensor_3 = aten.mul.Tensor(%cat_default, 0.5)  f32[35]
        ▶ %all_reduce_default_3 = _c10d_functional.all_reduce.default(%mul_tensor_3, 'sum', '0')  f32[35]
        ■ %wait_tensor_default_3 = _c10d_functional.wait_tensor.default(%all_reduce_default_3)  f32[35]
        %split_with_sizes_default = aten.split_with_sizes.default(%wait_tensor_default_3, [16, 16, 3])  (f32[16], f32[16], f32[3])
        %getitem = operator.getitem(%split_with_sizes_default, 0)  f32[16]
        %getitem_1 = operator.getitem(%split_with_sizes_default, 1)  f32[16]
        %view_default_1 = aten.view.default(%getitem_1, [2, 8])  f32[2, 8]
        %getitem_2 = operator.getitem(%split_with_sizes_default, 2)  f32[3]
        ── forward ──
        %exp_default = aten.exp.default(%getitem)  f32[16]
        %exp_default_1 = aten.exp.default(%view_default_1)  f32[2, 8]
        %exp_default_2 = aten.exp.default(%getitem_2)  f32[3]
        ── output ──
        results: [%exp_default, %exp_default_1, %exp_default_2]
        updates: []
        carried: []
        """,  # noqa: E501
    )


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop"])
def test_training_step(optimizer: str) -> None:
    gm = training_step(3, optimizer=optimizer)
    fused(gm, inputs_of(gm), changes=6)
    assert bucket_sizes(gm) == [6]


# Members that need care


def test_members_are_aligned() -> None:
    """Members begin at multiples of 64 bytes; the gaps are zeros of the sizes needed."""
    gm = fused(gradients((3,), (5, 5), (16,), (3,), (1,), ()))
    split = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::split_with_sizes"))[0]
    sizes = split.args[1]
    assert sizes == [3, 13, 25, 7, 16, 3, 13, 1, 15, 1]
    assert targets(gm).count("new_zeros") == 3
    offset = 0
    read = {item.args[1] for item in split.users}
    for index, size in enumerate(sizes):
        assert offset % 16 == 0 or index not in read
        offset += size


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.complex64])
def test_alignment_of_each_dtype(dtype: torch.dtype) -> None:
    s = Sketch()
    launches = [s.all_reduce(s.input(f"x{i}", 5, dtype=dtype)) for i in range(3)]
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    split = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::split_with_sizes"))[0]
    assert (split.args[1][0] + split.args[1][1]) * dtype.itemsize == 64


def test_one_tensor_sent_twice() -> None:
    s = Sketch()
    x = s.input("x", 3)
    launches = [s.all_reduce(x), s.all_reduce(x)]
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    split = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::split_with_sizes"))[0]
    assert split.args[1] == [3, 13, 3]


def test_empty_tensors_are_left_alone() -> None:
    gm = fused(gradients((0,), (4, 4), (0, 3), (2,)), changes=2)
    assert bucket_sizes(gm) == [1, 1, 2]


def test_constants_that_differ_stay_with_their_gradients() -> None:
    s = Sketch()
    launches = [s.average(s.input(f"x{i}", 4), factor) for i, factor in enumerate((0.5, 0.25))]
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    assert targets(gm).count("mul") == 2
    assert bucket_sizes(gm) == [2]


def test_product_that_others_read_stays() -> None:
    s = Sketch()
    scaled = [s.call(aten.mul.Tensor, s.input(f"x{i}", 4), 0.5) for i in range(2)]
    launches = [s.all_reduce(x) for x in scaled]
    read = s.call(aten.neg.default, scaled[0])
    gm = fused(s.step([read, *(s.call(aten.neg.default, s.wait(x)) for x in launches)]))
    assert targets(gm).count("mul") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1 / 7])
def test_scaling_a_bucket_gives_the_bits_of_scaling_its_members(
    dtype: torch.dtype, factor: float
) -> None:
    """Also for the smallest members, which kernels may treat as scalars."""
    whole = torch.randn(257).to(dtype)
    scaled = whole * factor
    for size in (1, 2, 7, 64):
        parts = [part * factor for part in whole.split(size)]
        assert torch.equal(torch.cat(parts), scaled)
    assert torch.equal(whole[0].clone() * factor, scaled[0])


def test_expanded_gradient() -> None:
    """`(w1 + w2).sum()` gives both gradients one element of storage."""
    s = Sketch()
    one = s.call(aten.ones_like.default, s.input("loss"))
    launches = [s.average(s.call(aten.expand.default, one, [4, 4])) for _ in range(2)]
    gm = fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]))
    assert bucket_sizes(gm) == [2]
    assert targets(gm).count("mul") == 1


def test_transposed_gradient_is_flattened_as_a_view() -> None:
    s = Sketch()
    results = []
    for i in range(2):
        gradient = s.call(aten.t.default, s.input(f"x{i}", 4, 8))
        scaled = s.call(aten.mul.Tensor, gradient, 0.5)
        launch = s.all_reduce(s.call(aten.permute.default, scaled, [1, 0]))
        total = s.call(aten.permute.default, s.wait(launch), [1, 0])
        results.append(s.call(aten.neg.default, total))
    gm = fused(s.step(results))
    assert bucket_sizes(gm) == [2]
    assert "clone" not in targets(gm)
    assert targets(gm).count("mul") == 1


def test_not_contiguous_is_left_alone() -> None:
    s = Sketch()
    launches = [s.all_reduce(s.call(aten.t.default, s.input(f"x{i}", 4, 8))) for i in range(2)]
    fused(s.step([s.call(aten.neg.default, s.wait(launch)) for launch in launches]), changes=0)


def test_reader_with_an_absolute_offset_is_left_alone() -> None:
    s = Sketch()
    waits = [s.wait(s.average(s.input(f"x{i}", 4, 8))) for i in range(3)]
    flat = s.call(aten.view.default, waits[1], [32])
    strided = s.call(aten.as_strided.default, flat, [8, 4], [1, 8], 0)
    gm = fused(s.step([s.call(aten.neg.default, x) for x in (waits[0], strided, waits[2])]))
    assert bucket_sizes(gm) == [1, 2]


def test_result_that_leaves_the_graph_is_copied_out() -> None:
    """What the user keeps must neither hold a whole bucket nor change with it."""
    s = Sketch()
    waits = [s.wait(s.average(s.input(f"x{i}", 4, 4))) for i in range(3)]
    view = s.call(aten.view.default, waits[1], [16])
    read = s.call(aten.exp.default, waits[0])
    gm = fused(s.step([read], [], [waits[0], view]))
    outputs = get_outputs(gm.graph)
    kept, view = outputs.carried
    assert is_operator(kept.target, "aten::clone")
    assert is_operator(view.target, "aten::view")
    assert is_operator(view.all_input_nodes[0].target, "aten::clone")
    assert outputs.results[0].all_input_nodes == [kept]
    assert targets(gm).count("clone") == 2


def test_late_nodes_are_left_alone() -> None:
    gm = IterGraphModule(training_step(3, optimizer="loop"))
    first = get_all_comm_blocks(gm)[0]
    destination = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::addmm"))[-1]
    wait = first.wait_nodes[0]
    late = sorted([wait, *find_all_descendants([wait])])
    gm.graph.move_to_next_iter_before(late, destination)
    comm_fusion_with_concat(gm)
    assert bucket_sizes(gm)[0] == 1
    assert bucket_sizes(gm)[1:] == [5]
    assert set(gm.graph.late) == set(late)


# What was captured


class Kept(nn.Module):
    """Gradients of many shapes: a matrix used transposed, a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.matrix = nn.Parameter(torch.randn(8, 5))
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.matrix


def keep_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_captured_step_has_no_absolute_offsets() -> None:
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 3, 6, 6)
    captured = graphopt.capture(keep_step, model, optimizer, x, parallel=graphopt.DataParallel())
    gm = captured.graph_module
    assert "as_strided" not in targets(gm)
    comm_fusion_with_concat(gm)
    assert bucket_sizes(gm) == [3]
    strides = [node.meta["val"].stride() for node in get_outputs(gm.graph).carried]
    assert sorted(strides) == sorted(p.stride() for p in model.parameters())


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_a_trained_model(kept: bool) -> None:
    """The step as a whole: the same bits, and gradients that own their storage."""
    torch.manual_seed(0)
    case = MODELS["mlp"]
    results = []
    for pipeline in ("none", "comm_fusion_with_concat"):
        torch.manual_seed(0)
        model = case.make()
        optimizer = OPTIMIZERS["adamw-foreach"](model.parameters())
        step = graphopt.compile(
            keep_mlp_step if kept else train_step,
            pipeline=pipeline,
            parallel=graphopt.DataParallel(),
        )
        for i in range(3):
            step(model, optimizer, *case.batch(i))
        results.append([p.detach().clone() for p in model.parameters()])
        for p in model.parameters():
            assert (p.grad is not None) == kept
            if p.grad is not None:
                held = p.grad.untyped_storage().nbytes()
                assert held == p.grad.nbytes
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def keep_mlp_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# Metadata and bad input


def test_new_nodes_know_where_they_come_from() -> None:
    model = MODELS["mlp"].make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gm = graphopt.capture(
        train_step, model, optimizer, *MODELS["mlp"].batch(0), parallel=graphopt.DataParallel()
    ).graph_module
    before = set(gm.graph.nodes)
    comm_fusion_with_concat(gm)
    new = [node for node in gm.graph.nodes if node not in before]
    assert new
    for node in new:
        assert node.meta["phase"] == "communication"
        assert node.meta["provenance"][-1] == "comm_fusion_with_concat"
        assert "val" in node.meta
    items = [node for node in new if node.target is operator.getitem]
    assert all("capture" in node.meta["provenance"] for node in items)


@pytest.mark.parametrize("size", [0, -1, -0.5, float("nan"), True, "25", None])
def test_bad_bucket_size(size: Any) -> None:
    gm = gradients((4,), (4,))
    before = str(gm.graph)
    with pytest.raises(graphopt.GraphOptError, match="bucket_size_mb") as caught:
        comm_fusion_with_concat(gm, bucket_size_mb=size)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert str(gm.graph) == before


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "16"])
def test_bad_number_of_buckets(count: Any) -> None:
    gm = gradients((4,), (4,))
    before = str(gm.graph)
    with pytest.raises(graphopt.GraphOptError, match="min_buckets") as caught:
        comm_fusion_with_concat(gm, min_buckets=count)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert str(gm.graph) == before


def test_collective_without_wait() -> None:
    s = Sketch()
    x = s.input("x", 4)
    launch = s.all_reduce(x)
    gm = s.step([s.call(aten.neg.default, x)])
    with pytest.raises(graphopt.VerificationError, match=f"%{launch.name} has no wait"):
        comm_fusion_with_concat(gm)
    assert any(is_collective(node) for node in gm.graph.nodes)


def test_graph_without_communication() -> None:
    s = Sketch()
    fused(s.step([s.call(aten.neg.default, s.input("x", 4))]), changes=0)
