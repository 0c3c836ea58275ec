"""The cut into CUDA graphs is proven: what pieces compute, and what replays overwrite."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from cudagraphs_emulation import EmulatedRecorder, pieces_of
from graphopt.executable import finalize
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.lowering.cudagraphs.pieces import InputTransfer
from graphopt.lowering.lowering_stages import RecordCudaGraphs
from graphopt.stages import default_pipeline
from graphopt.stages.compiling import Stages
from graphopt.testing import fake_ranks
from graphopt.verify import check_divided
from graphopt.verify.checks.cuda_graph_checks import recording_problems
from zoo import MODELS, OPTIMIZERS, train_step

aten = torch.ops.aten
STEPS = ["adamw-fused", "sgd-momentum-foreach", "adam-decay-loop"]


@cache
def whole(model: str, optimizer: str) -> fx.GraphModule:
    """The steady graph of a step on two ranks."""
    module = MODELS[model].make()
    args = (module, OPTIMIZERS[optimizer](module.parameters()), *MODELS[model].batch(0))
    with fake_ranks(2):
        train_step(*args)
        gm = IterGraphModule(graphopt.capture(train_step, *args).graph_module)
        graphopt.PassManager(default_pipeline(), verify="off").run(gm)
        return finalize(gm.main_gm)


def cut(model: str, optimizer: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """That graph as one, and in pieces."""
    made = whole(model, optimizer)
    before, after = (fx.GraphModule(made, copy_graph(made.graph)[0]) for _ in range(2))
    with fake_ranks(2):
        return before, CudaGraphs(EmulatedRecorder(records_groups=True)).apply(after)


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_every_cut_is_proven(model: str, optimizer: str) -> None:
    before, after = cut(model, optimizer)
    assert pieces_of(after)
    report = check_divided(before, after)
    assert report.ok, str(report)
    assert not list(recording_problems(after))


def bodies_with(gm: fx.GraphModule, target: Any) -> list[tuple[fx.Graph, list[fx.Node]]]:
    graphs = [piece.graph_module.graph for piece in pieces_of(gm)]
    return [(g, g.find_nodes(op="call_function", target=target)) for g in graphs]


def another_operator(gm: fx.GraphModule) -> None:
    found = next(nodes for _, nodes in bodies_with(gm, aten.mm.default) if nodes)
    found[0].args = (found[0].args[0], found[0].args[1])
    with found[0].graph.inserting_after(found[0]):
        negated = found[0].graph.call_function(aten.neg.default, (found[0],))
    negated.meta = dict(found[0].meta)
    found[0].replace_all_uses_with(negated, lambda user: user is not negated)


def an_update_left_out(gm: fx.GraphModule) -> None:
    graph, found = next((g, n) for g, n in bodies_with(gm, aten._fused_adamw_.tensor_lr) if n)
    graph.erase_node(found[0])


def results_exchanged(gm: fx.GraphModule) -> None:
    for call in gm.graph.find_nodes(op="call_module"):
        items = [item for item in call.users if item.target is operator.getitem]
        shapes: dict[Any, fx.Node] = {}
        for item in items:
            key = tuple(item.meta["val"].shape)
            other = shapes.setdefault(key, item)
            if other is not item:
                item.args, other.args = other.args, item.args
                return
    raise AssertionError("no two results alike")


def arguments_exchanged(gm: fx.GraphModule) -> None:
    for call in gm.graph.find_nodes(op="call_module"):
        args = list(call.args)
        for a in range(len(args)):
            for b in range(a):
                kinds = [(n.meta["val"].shape, n.meta["val"].dtype) for n in (args[a], args[b])]
                if kinds[0] == kinds[1] and kinds[0][0].numel() > 1:
                    args[a], args[b] = args[b], args[a]
                    call.args = tuple(args)
                    return
    raise AssertionError("no two arguments alike")


def a_piece_twice(gm: fx.GraphModule) -> None:
    call = next(n for n in gm.graph.find_nodes(op="call_module") if n.meta["writes"])
    with gm.graph.inserting_after(call):
        again = gm.graph.node_copy(call)
    assert again.target == call.target


def pieces_in_another_order(gm: fx.GraphModule) -> None:
    calls = gm.graph.find_nodes(op="call_module")
    calls[-1].target, calls[-2].target = calls[-2].target, calls[-1].target


CUTS: dict[str, Callable[[fx.GraphModule], None]] = {
    edit.__name__: edit
    for edit in (
        another_operator,
        an_update_left_out,
        results_exchanged,
        arguments_exchanged,
        a_piece_twice,
        pieces_in_another_order,
    )
}


@pytest.mark.parametrize("edit", CUTS)
def test_a_wrong_cut_is_refused(edit: str) -> None:
    before, after = cut("checkpointed", "adamw-fused")
    CUTS[edit](after)
    assert not check_divided(before, after).ok


@pytest.mark.parametrize("model", ["mlp", "gpt", "convnet"])
def test_a_result_that_is_overwritten_is_refused(model: str) -> None:
    _, after = cut(model, "adamw-fused")
    found = 0
    for piece in pieces_of(after):
        for index, leaves in enumerate(piece.leaving):
            if leaves:
                piece._leaving[index] = False
                problems = list(recording_problems(after))
                piece._leaving[index] = True
                assert any("overwrites it" in problem.message for problem in problems)
                found += 1
    assert found


@pytest.mark.parametrize("model", ["mlp", "gpt", "convnet"])
def test_an_update_of_a_copy_is_refused(model: str) -> None:
    _, after = cut(model, "adamw-fused")
    found = 0
    for piece in pieces_of(after):
        inputs = piece._inputs
        for index, given in enumerate(inputs._inputs):
            if given.written:
                inputs._inputs[index] = given._replace(way=InputTransfer.COPIED)
                inputs._sort()
                problems = list(recording_problems(after))
                inputs._inputs[index] = given
                inputs._sort()
                assert any("read a copy" in problem.message for problem in problems)
                found += 1
    assert found


class Careless(CudaGraphs):
    """Hands no result out as a copy."""

    def apply(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = super().apply(gm)
        for piece in pieces_of(found):
            piece._leaving = [False] * len(piece.leaving)
        return found


@pytest.mark.parametrize("graphs", [CudaGraphs, Careless])
def test_the_stage_is_checked(graphs: type[CudaGraphs], caplog: pytest.LogCaptureFixture) -> None:
    module = MODELS["mlp"].make()
    args = (module, OPTIMIZERS["adamw-fused"](module.parameters()), *MODELS["mlp"].batch(0))
    with fake_ranks(2), caplog.at_level(logging.INFO, "graphopt"):
        train_step(*args)
        stages = Stages(graphopt.PassManager(default_pipeline()), None)
        step = stages.apply_passes(graphopt.capture(train_step, *args))
        stages.derive(step)
        record = RecordCudaGraphs(graphopt.lowering.compiler.Options(cudagraphs=True))
        record._graphs = graphs(EmulatedRecorder(records_groups=True))
        stages.behind.append(record)
        if graphs is CudaGraphs:
            stages.make_executable(step)
            assert any(r.name == "record" for r in graphopt.manager.records_of(step.module))
            assert "not compared" not in caplog.text
            return
        with pytest.raises(
            graphopt.VerificationError, match="stage 'record' of 'main' was refused"
        ):
            stages.make_executable(step)
