"""Waits right before the first reader, and nothing else changed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.graph_utils import find_all_descendants, find_nodes, get_output, is_operator, is_wait
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import comm_fusion_with_concat, schedule_comm_wait
from graphopt.testing import check_pass
from graphopt.tracing import SourceLine
from graphs import inputs_of, training_step
from sketch import Sketch, c10d, one_rank, targets, values_for
from zoo import MLP, MODELS

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def fused(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph after the pass that has to come first, which leaves single all-reduces alone."""
    comm_fusion_with_concat(gm, bucket_size_mb=1e-9)
    return gm


def check(gm: fx.GraphModule, changes: int | None = None, expect: str | None = None) -> Any:
    check_pass(fused(gm), values_for(gm), schedule_comm_wait, changes=changes, expect=expect)
    schedule_comm_wait(gm)
    return gm


def test_golden() -> None:
    s = Sketch()
    x, y = s.input("x", 2, 3), s.input("y", 3)
    launch = s.all_reduce(s.call(aten.neg.default, x))
    flat = s.call(aten.view.default, s.wait(launch), [6])
    split = s.call(aten.split_with_sizes.default, flat, [4, 2])
    items = [s.call(operator.getitem, split, i) for i in range(2)]
    between = s.call(aten.exp.default, y)
    reader = s.call(aten.sin.default, items[1])
    check(
        s.step([between, reader, s.call(aten.cos.default, items[0])]),
        changes=1,
        expect="""
        ── inputs ──
        %x  f32[2, 3]
        %y  f32[3]
        ── forward ──
        %neg_default = aten.neg.default(%x)  f32[2, 3]
        ▶ %all_reduce_default = _c10d_functional.all_reduce.default(%neg_default, 'sum', '0')  f32[2, 3]
        %exp_default = aten.exp.default(%y)  f32[3]
        ■ %wait_tensor_default = _c10d_functional.wait_tensor.default(%all_reduce_default)  f32[2, 3]
        %view_default = aten.view.default(%wait_tensor_default, [6])  f32[6]
        %split_with_sizes_default = aten.split_with_sizes.default(%view_default, [4, 2])  (f32[4], f32[2])
        %getitem = operator.getitem(%split_with_sizes_default, 0)  f32[4]
        %getitem_1 = operator.getitem(%split_with_sizes_default, 1)  f32[2]
        %sin_default = aten.sin.default(%getitem_1)  f32[2]
        %cos_default = aten.cos.default(%getitem)  f32[4]
        ── output ──
        results: [%exp_default, %sin_default, %cos_default]
        updates: []
        carried: []
        """,  # noqa: E501
    )


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "loop"])
def test_training_step(optimizer: str) -> None:
    gm = training_step(3, optimizer=optimizer)
    comm_fusion_with_concat(gm, bucket_size_mb=0.0003)
    check_pass(gm, inputs_of(gm), schedule_comm_wait)


def test_waits_of_a_list_stand_before_it_in_launch_order() -> None:
    gm = training_step(2, optimizer="foreach")
    comm_fusion_with_concat(gm, bucket_size_mb=0.0003)
    schedule_comm_wait(gm)
    launches = [block.comm_node for block in get_all_comm_blocks(gm)]
    waits = find_nodes(gm.graph, is_wait)
    assert len(waits) > 1
    assert [wait.all_input_nodes[0] for wait in waits] == launches
    reader = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::_foreach_add"))[0]
    tail = [node for block in get_all_comm_blocks(gm) for node in block.tail]
    before = reader
    for node in reversed(tail):
        assert before.prev is node
        before = node


def test_wait_that_stands_right_stays() -> None:
    s = Sketch()
    gm = check(s.step([s.call(aten.neg.default, s.wait(s.all_reduce(s.input("x", 4))))]), changes=0)
    assert targets(gm) == ["all_reduce", "wait_tensor", "neg"]


def test_one_of_two_waits_moves() -> None:
    s = Sketch()
    x, y = s.input("x", 4), s.input("y", 4)
    first, second = s.all_reduce(x), s.all_reduce(y, "max")
    early = s.wait(first)
    between = s.call(aten.exp.default, x)
    total = s.call(aten.add.Tensor, early, s.wait(second))
    gm = check(s.step([between, total]), changes=1)
    assert targets(gm) == ["all_reduce", "all_reduce", "exp", "wait_tensor", "wait_tensor", "add"]


def test_launch_that_reads_the_result_of_another() -> None:
    s = Sketch()
    x = s.input("x", 4)
    first = s.wait(s.all_reduce(x))
    between = s.call(aten.exp.default, x)
    second = s.wait(s.all_reduce(first, "max"))
    gm = check(s.step([between, s.call(aten.neg.default, second)]), changes=0)
    assert targets(gm) == ["all_reduce", "wait_tensor", "all_reduce", "exp", "wait_tensor", "neg"]


def test_result_that_is_returned() -> None:
    s = Sketch()
    x = s.input("x", 4)
    wait = s.wait(s.all_reduce(x))
    view = s.call(aten.view.default, wait, [2, 2])
    between = s.call(aten.exp.default, x)
    gm = check(s.step([between], [], [view]), changes=1)
    assert targets(gm) == ["all_reduce", "exp", "wait_tensor", "view"]
    assert get_output(gm.graph).prev.target is aten.view.default


def test_each_wait_of_a_coalesced_collective() -> None:
    s = Sketch()
    x, y = s.input("x", 4), s.input("y", 4)
    launch = s.call(c10d.all_reduce_coalesced.default, [x, y], "sum", "0")
    waits = [s.wait(s.call(operator.getitem, launch, i)) for i in range(2)]
    first = s.call(aten.exp.default, waits[1])
    second = s.call(aten.sin.default, waits[0])
    gm = check(s.step([first, second]), changes=1)
    expected = ["getitem", "getitem", "wait_tensor", "exp", "wait_tensor", "sin"]
    assert targets(gm) == ["all_reduce_coalesced", *expected]


def test_late_waits_stay() -> None:
    gm = IterGraphModule(training_step(2, optimizer="loop"))
    comm_fusion_with_concat(gm, bucket_size_mb=1e-9)
    block = get_all_comm_blocks(gm)[0]
    wait = block.wait_nodes[0]
    late = sorted([wait, *find_all_descendants([wait])])
    destination = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::addmm"))[-1]
    gm.graph.move_to_next_iter_before(late, destination)
    schedule_comm_wait(gm)
    assert set(gm.graph.late) == set(late)


# Results that nobody reads


def test_unread_result_is_an_error() -> None:
    s = Sketch()
    x = s.input("x", 4)
    launch = s.all_reduce(x)
    launch.meta["source"] = SourceLine("train.py", 41, "train_step")
    s.wait(launch)
    gm = fused(s.step([s.call(aten.neg.default, x)]))
    before = str(gm.graph)
    with pytest.raises(graphopt.VerificationError) as caught:
        schedule_comm_wait(gm)
    assert f"%{launch.name}" in str(caught.value)
    assert "train.py:41" in str(caught.value)
    assert str(gm.graph) == before


def test_collective_without_wait_is_an_error() -> None:
    s = Sketch()
    x = s.input("x", 4)
    launch = s.call(c10d.broadcast.default, x, 0, "0")
    gm = fused(s.step([s.call(aten.neg.default, x)]))
    with pytest.raises(graphopt.VerificationError, match=f"%{launch.name} has no wait"):
        schedule_comm_wait(gm)


def test_gradient_that_no_optimizer_has() -> None:
    """It is averaged all the same, as DistributedDataParallel does, and waited for at the end."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    model = MLP()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    gm = graphopt.capture(
        step, model, optimizer, *MODELS["mlp"].batch(0), parallel=graphopt.DataParallel()
    ).graph_module
    fused(gm)
    schedule_comm_wait(gm)
    unread = [wait for wait in find_nodes(gm.graph, is_wait) if not wait.users]
    assert len(unread) == 4
    last = get_output(gm.graph)
    for wait in reversed(unread):
        assert last.prev is wait
        last = wait


# Order of passes


def test_fusion_comes_first() -> None:
    s = Sketch()
    gm = s.step([s.call(aten.neg.default, s.wait(s.all_reduce(s.input("x", 4))))])
    schedule_comm_wait(gm)
    with pytest.raises(graphopt.PassOrderError, match="'comm_fusion_with_concat' comes too late"):
        comm_fusion_with_concat(gm)


def test_graph_without_communication() -> None:
    s = Sketch()
    check(s.step([s.call(aten.neg.default, s.input("x", 4))]), changes=0)
