"""Which parts of late groups, of communication and of whole steps are recorded."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import graphopt
from cudagraphs_emulation import pieces_of
from cudagraphs_sketch import CUDA, CudaSketch, NoRecorder, outside
from graphopt import _compat
from graphopt.executable import finalize
from graphopt.ir.metadata import LATE_GROUP as GROUP
from graphopt.ir.views import is_pure_view
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.lowering.cudagraphs.pieces import InputTransfer, find_pieces, gather_items
from graphopt.lowering.cudagraphs.recorder import Recordable
from sketch import c10d
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten


# ---------------------------------------------------------------------------- late groups


def test_late_groups_and_the_rest_are_not_mixed() -> None:
    s = CudaSketch()
    a, b, c = (s.input(name, 4, kind="parameter") for name in "abc")
    parts = [(a, {GROUP: 0}), (b, {GROUP: 1}), (b, {GROUP: 0}), (c, {}), (a, {GROUP: 1})]
    results = [s.chain(value, **meta) for value, meta in parts]
    view = s.call(aten.t.default, a)
    view.meta[GROUP] = 3
    results.append(s.chain(s.call(aten.mul.Tensor, results[-1], view), **{GROUP: 1}))
    found = s.found(results)
    assert [piece.group for piece in found.pieces] == [0, 1, 0, None, 1, 1]
    for piece in found.pieces:
        assert {node.meta.get(GROUP) for node in piece.nodes} == {piece.group}


def test_the_views_of_a_group_stay_in_it() -> None:
    """What a piece hands to its own group must not come after the group's end."""
    s = CudaSketch()
    x, w = s.input("x", 4, kind="carried"), s.input("w", 4, kind="parameter")
    value = s.chain(x, 8, **{GROUP: 0})
    view = s.call(aten.view.default, value, [2, 2])
    view.meta[GROUP] = 0
    last = s.chain(w)
    gm = s.step([last, view])
    CudaGraphs(NoRecorder()).apply(gm)
    names = [(n.name, n.meta.get(GROUP)) for n in gm.graph.nodes if n.op != "placeholder"]
    groups = [group for _, group in names]
    assert groups == sorted(groups, key=lambda group: group is None)
    assert any(is_pure_view(n) and n.target is not operator.getitem for n in gm.graph.nodes)


def test_a_piece_of_a_group_says_that_it_updates_state() -> None:
    """Running code marks there that the group begins to write."""
    s = CudaSketch()
    w, g = s.input("w", 4, kind="parameter"), s.input("g", 4, kind="carried")
    updated = s.call(aten.add_.Tensor, w, s.chain(g, **{GROUP: 0}))
    updated.meta[GROUP] = 0
    gm = s.step([], updates=[updated])
    CudaGraphs(NoRecorder()).apply(gm)
    (call,) = (node for node in gm.graph.nodes if node.op == "call_module")
    assert [call.args[index].name for index in call.meta["writes"]] == ["w"]
    assert call.meta[GROUP] == 0


# ---------------------------------------------------------------------------- collectives


def test_a_collective_within_a_piece_is_recorded() -> None:
    s = CudaSketch()
    x = s.chain(s.input("x", 4))
    launch = s.all_reduce(x)
    found = s.found([s.chain(s.wait(launch))])
    assert len(found.pieces) == 1 and found.reasons == {}


def test_collectives_of_other_backends_are_not() -> None:
    s = CudaSketch()
    x = s.chain(s.input("x", 4))
    launch = s.all_reduce(x)
    wait = s.wait(launch)
    found = s.found([s.chain(wait)], groups=False)
    assert len(found.pieces) == 2
    assert "does not communicate by NCCL" in found.reasons[launch]
    assert "begins and ends in different places" in found.reasons[wait]


def test_a_launch_whose_wait_is_in_the_next_iteration_stays_outside() -> None:
    s = CudaSketch()
    launch = s.call(c10d.all_reduce_.default, s.chain(s.input("x", 4)), "sum", "0")
    other = s.chain(s.input("y", 4))
    found = s.found([other], carried=[launch])
    assert "different places" in found.reasons[launch]
    assert len(found.pieces) == 2
    assert launch.args[0] in found.pieces[0].leaving, "it is reduced while the next call runs"


def test_a_wait_for_the_previous_iteration_stays_outside() -> None:
    s = CudaSketch()
    wait = s.wait(s.input("bucket", 4, kind="carried"))
    found = s.found([s.chain(wait)])
    assert "different places" in found.reasons[wait]
    (piece,) = found.pieces
    assert piece.inputs == {wait: InputTransfer.COPIED}


def test_what_is_sent_until_the_next_iteration_is_not_overwritten() -> None:
    s = CudaSketch()
    sent = s.chain(s.input("x", 4))
    launch = s.call(c10d.all_gather_into_tensor.default, sent, 2, "0")
    found = s.found([], carried=[launch])
    (piece,) = found.pieces
    assert sent in piece.leaving


def test_a_collective_around_something_that_is_not_recorded_is_not_either() -> None:
    s = CudaSketch()
    launch = s.all_reduce(s.chain(s.input("x", 4)))
    read = s.call(aten._local_scalar_dense.default, s.call(aten.sum.default, s.input("y", 4)))
    found = s.found([s.chain(s.wait(launch)), s.chain(s.input("z", 4))])
    assert "waits for the device" in found.reasons[read]
    assert "different places" in found.reasons[launch]
    assert not any(launch in piece.nodes for piece in found.pieces)


# ---------------------------------------------------------------------------- whole steps


def on_cuda(graph: fx.Graph) -> None:
    """Let a graph that was captured on the CPU be on CUDA, hyperparameters apart."""
    mode = _compat.new_fake_mode()
    storages: dict[int, Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = _compat.storage_key(value)
        if key not in storages:
            size = value.untyped_storage().nbytes() // value.element_size()
            storages[key] = torch.empty(size, dtype=value.dtype, device=CUDA)
        return aten.as_strided.default(
            storages[key], value.shape, value.stride(), value.storage_offset()
        )

    with mode:
        for node in graph.nodes:
            if node.meta.get("kind") != "hyperparameter" and "val" in node.meta:
                node.meta["val"] = _compat.tree_map(moved, node.meta["val"])


def executable(model: str, optimizer: str) -> fx.GraphModule:
    case = MODELS[model]
    module = case.make()
    trained = OPTIMIZERS[optimizer](module.parameters())
    train_step(module, trained, *case.batch(0))
    captured = graphopt.capture(train_step, module, trained, *case.batch(1)).graph_module
    on_cuda(captured.graph)
    return finalize(captured)


@pytest.mark.parametrize("model", ["gpt", "convnet"])
def test_a_step_with_a_fused_optimizer_is_recorded_whole(model: str) -> None:
    gm = executable(model, "adamw-fused")
    recordable = Recordable("cuda", lambda name: True)
    gather_items(gm.graph)
    found = find_pieces(gm, recordable, min_ops=4)
    assert set(outside(found)) == {"_local_scalar_dense"}
    step, update = found.pieces
    kinds = {
        way: {n.meta.get("kind") for n, w in step.inputs.items() if w is way}
        for way in InputTransfer
    }
    assert kinds[InputTransfer.COPIED] == {"user_input"}
    assert kinds[InputTransfer.STATIC] <= {"parameter", "buffer", "optimizer_state"}
    ways = {node: way for node, way in update.inputs.items() if way is not InputTransfer.STATIC}
    assert {way: node.meta.get("kind") for node, way in ways.items()} == {
        InputTransfer.SCALAR: "hyperparameter",
        InputTransfer.NUMBER: None,
    }
    assert {node.meta["kind"] for node in update.written} == {"parameter", "optimizer_state"}


def test_only_the_loss_leaves_a_step() -> None:
    gm = CudaGraphs(NoRecorder()).apply(executable("gpt", "adamw-fused"))
    first, second = pieces_of(gm)
    assert sum(first._leaving) == 1 and second._leaving == []
    computing = [n for n in gm.graph.nodes if n.op == "call_function" and not is_pure_view(n)]
    assert {str(node.target) for node in computing} <= {
        "aten._local_scalar_dense.default",
        str(operator.getitem),
    }


def test_an_optimizer_of_python_numbers_stays_outside() -> None:
    gm = executable("mlp", "adamw-loop")
    gather_items(gm.graph)
    found = find_pieces(gm, Recordable("cuda", lambda name: True), 4)
    assert len(found.pieces) >= 1
    for node, reason in found.reasons.items():
        assert node.meta["phase"] == "optimizer", (node, reason)
    assert all(way is not InputTransfer.NUMBER for way in found.pieces[0].inputs.values())


def test_a_recording_is_cut_the_same_way_again() -> None:
    """The graph that is left has no piece that could be cut further."""
    gm = CudaGraphs(NoRecorder()).apply(executable("convnet", "sgd-momentum-fused"))
    before = str(gm.graph)
    again = find_pieces(gm, Recordable("cuda", lambda name: True), min_ops=4)
    assert again.pieces == [] and str(gm.graph) == before
    assert len(pieces_of(gm)) == 2
