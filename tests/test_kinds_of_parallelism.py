"""Kinds of parallelism: markers from the capture, and what a kind makes of them.

`Apart` below is a whole further kind, in one file: nothing else knows of it.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import graphopt
from gloo import Pool
from graphopt._compat import new_fake_mode
from graphopt.commands.optimize import run_stages
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.manager import records_of
from graphopt.parallel import DataParallel, Manual, OverRanks, Parallel
from graphopt.parallel.data_parallel import average
from graphopt.parallel.markers import (
    Group,
    markers_of,
    marks_gradient,
    reduce_gradient,
    replace_marker,
)
from graphopt.parallel.parallelize import parallelize
from graphopt.readable import compact_text
from graphopt.saved import load_graph, save_graph
from graphopt.testing import fake_ranks
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.tracing.captured_step import CapturedStep
from graphopt.verify import check_captured, check_graph
from sketch import one_rank
from twins import SEED, World, assert_same
from zoo import MODELS, OPTIMIZERS, train_step


@dataclass(frozen=True)
class Apart(OverRanks):
    """Ranks that run the same step and share nothing."""

    def expand(self, graph: fx.Graph) -> int:
        markers = markers_of(graph)
        for marker in markers:
            replace_marker(marker, marker.args[0])  # type: ignore[arg-type]
        return len(markers)


@dataclass(frozen=True)
class Forgetful(DataParallel):
    """Expands all markers but the first."""

    def expand(self, graph: fx.Graph) -> int:
        first = markers_of(graph)[0]
        target, args, meta, place = first.target, first.args, first.meta, first.prev
        expanded = super().expand(graph)
        kept = graph.call_function(target, args)  # type: ignore[arg-type]
        kept.meta = meta
        place.append(kept)
        return expanded - 1


@dataclass(frozen=True)
class Failing(OverRanks):
    """Cannot do what it is for."""

    def expand(self, graph: fx.Graph) -> int:
        raise ZeroDivisionError("no ranks")


def made(model: str, optimizer: str = "adamw-fused") -> tuple[nn.Module, Any]:
    module = MODELS[model].make()
    return module, OPTIMIZERS[optimizer](module.parameters())


def marked(model: str, kind: OverRanks) -> CapturedStep:
    """A step of two ranks before its markers are expanded."""
    call = Call(train_step, (*made(model), *MODELS[model].batch(0)), {})
    return capture_call(call, communication_for(kind))


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes]


# Markers


@pytest.mark.parametrize("model", ["mlp", "convnet", "shared-storage"])
def test_a_capture_writes_markers_and_a_kind_expands_them(model: str) -> None:
    with fake_ranks(2):
        captured = marked(model, DataParallel())
        graph = captured.graph_module.graph
        markers = markers_of(graph)
        parameters = [s.fqn for s in captured.inputs if s.kind == "parameter"]
        assert [m for m in markers if marks_gradient(m)] and not find_nodes(graph, is_collective)
        if model != "shared-storage":  # two parameters, one placeholder
            assert {m.args[1] for m in markers if marks_gradient(m)} == set(parameters)
        assert sum(not marks_gradient(m) for m in markers) == (model != "mlp")
        assert check_graph(graph, captured.inputs, marked=True).ok
        assert "has expanded" in str(check_captured(captured))
        assert parallelize(captured.graph_module, captured.parallel) == len(markers)
        assert not markers_of(graph) and find_nodes(graph, is_collective)
        assert check_captured(captured).ok
        assert parallelize(captured.graph_module, captured.parallel) == 0
        args = *made(model), *MODELS[model].batch(0)
        direct = graphopt.capture(train_step, *args, warm=False)
        assert compact_text(direct.graph_module) == compact_text(captured.graph_module)


def test_a_step_of_its_own_communication_has_none() -> None:
    with fake_ranks(2):
        args = (*made("convnet"), *MODELS["convnet"].batch(0))
        captured = graphopt.capture(train_step, *args, parallel=Manual())
        assert not find_nodes(captured.graph_module.graph, is_collective)


LAYOUTS = {
    "contiguous": lambda: torch.ones(3, 4),
    "transposed": lambda: torch.ones(4, 3).t(),
    "expanded": lambda: torch.ones(()).expand(3, 4),
    "rows of a matrix": lambda: torch.ones(6, 4)[::2],
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sizes of one": lambda: torch.ones(3, 1, 4).transpose(0, 1),
    "number": lambda: torch.ones(()),
    "empty": lambda: torch.ones(0, 3),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64).t(),
    "half": lambda: torch.ones(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_marker_says_what_the_average_has(layout: str) -> None:
    """Shape, strides, dtype: the trace goes on with them."""
    with fake_ranks(2), new_fake_mode(), torch.no_grad():
        gradient, group = LAYOUTS[layout](), Group("0", 2)
        given, mean = reduce_gradient(gradient, "w", group), average(gradient, group)
        for found in (given, mean):
            assert found.shape == gradient.shape and found.dtype == gradient.dtype
        assert given.stride() == mean.stride() and given.layout == mean.layout


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with fake_ranks(2), pytest.raises(graphopt.CaptureError) as caught:
        graphopt.capture(step, model, optimizer, torch.tensor([1, 2]))
    assert "the gradient of weight is sparse" in str(caught.value)
    assert "optimizer.step()" in str(caught.value)


def test_markers_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with markers can be kept, and taken through the list by the command line."""
    monkeypatch.chdir(tmp_path)
    with fake_ranks(2):
        captured = marked("convnet", DataParallel())
        save_graph(captured.graph_module, "marked.pt")
        parallelize(captured.graph_module, captured.parallel)
    loaded = load_graph("marked.pt")
    assert len(markers_of(loaded.graph)) == len(list(captured.live.parameters)) + 1
    stages = "capture -> parallelize"
    run_stages(Path("marked.pt"), stages, out=Path("out.pt"), dump=None, verify=None)
    expanded = load_graph("out.pt")
    assert targets(expanded.graph) == targets(captured.graph_module.graph)
    assert [record.name for record in records_of(expanded)] == ["capture", "parallelize"]


# A stage like any other


def compiled(kind: Parallel, model: str = "convnet") -> tuple[graphopt.TrainStep, tuple[Any, ...]]:
    """A step that has been called, and the model and optimizer without which its graph goes."""
    step = graphopt.compile(train_step, pipeline="none", parallel=kind)
    trained = made(model)
    step(*trained, *MODELS[model].batch(0))
    return step, trained


def test_the_stage_is_recorded_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_DUMP", "dump")
    with one_rank():
        step, _trained = compiled(DataParallel())
    capture, record = step.report[:2]
    assert (capture.name, record.name) == ("capture", "parallelize") and record.stage
    assert record.arguments == {"kind": "DataParallel"} and record.changed
    launches = find_nodes(step.graph_module.graph, is_collective)
    assert (record.collectives_before, record.collectives_after) == (0, len(launches))
    assert capture.collectives_after == 0 and record.changes == len(launches) - 1
    assert "reduce_gradient" in Path("dump/after_capture.txt").read_text()
    text = Path("dump/after_parallelize.txt").read_text()
    assert "all_reduce" in text and "reduce_gradient" not in text
    assert Path("dump/after_parallelize.diff").is_file()


def test_a_step_that_talks_to_nobody_has_no_such_stage() -> None:
    step, _trained = compiled(Manual(), "mlp")
    assert "parallelize" not in [record.name for record in step.report]


def test_a_kind_that_leaves_a_marker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with one_rank(), pytest.raises(graphopt.VerificationError) as caught:
        compiled(Forgetful())
    text = str(caught.value)
    assert text.startswith("stage 'parallelize' was refused: a marker that no kind"), text
    assert "reduce_gradient" in text or "sync_buffers" in text
    found = re.search(r"graphopt optimize (\S+) --stages parallelize", text)
    assert found, text
    assert len(markers_of(load_graph(found[1]).graph)) > 1
    run_stages(Path(found[1]), "parallelize", out=None, dump=None, verify=None)


def test_a_kind_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with one_rank(), pytest.raises(graphopt.PassError) as caught:
        compiled(Failing())
    text = str(caught.value)
    assert text.startswith("stage 'parallelize' raised ZeroDivisionError: no ranks"), text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_no_kind_is_refused() -> None:
    step = graphopt.compile(train_step, parallel="data")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parallel='data': pass None"):
        step(*made("mlp"), *MODELS["mlp"].batch(0))
    with pytest.raises(graphopt.CollectiveError, match=r"Apart\(\) works over a process group"):
        graphopt.compile(train_step, parallel=Apart())(*made("mlp"), *MODELS["mlp"].batch(0))


def test_only_data_parallelism_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_OFF", "1")
    with one_rank():
        compiled(DataParallel(), "mlp")
        with pytest.raises(graphopt.CaptureError, match="what Apart does to a graph is not done"):
            compiled(Apart(), "mlp")


# A further kind, on real ranks


def plain_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run_apart(rank: int, model: str, broadcast: bool) -> tuple[list[str], float]:
    torch.manual_seed(SEED + rank)
    module, optimizer = made(model)
    alone = copy.deepcopy(module)
    if broadcast:  # everybody starts from rank 0's values, as under any kind
        torch.manual_seed(SEED)
        alone.load_state_dict(MODELS[model].make().state_dict())
    twin = OPTIMIZERS["adamw-fused"](alone.parameters())
    step = graphopt.compile(plain_step, parallel=Apart(broadcast=broadcast))
    for index in range(3):
        batch = MODELS[model].batch(1000 * rank + index)
        loss = step(module, optimizer, *batch)
        assert torch.equal(loss, plain_step(alone, twin, *batch))
    step.flush()
    assert_same(
        World(plain_step, [module], [optimizer]).state(),
        World(plain_step, [alone], [twin]).state(),
        "state",
    )
    assert not find_nodes(step.graph_module.graph, is_collective)
    assert step.report[1].arguments == {"kind": "Apart"}
    return [record.name for record in step.report], float(loss)


@pytest.mark.parametrize(("model", "broadcast"), [("mlp", False), ("convnet", True)])
def test_a_further_kind_is_one_file(two_ranks: Pool, model: str, broadcast: bool) -> None:
    (report, loss), (other, theirs) = two_ranks.run(run_apart, model, broadcast)
    assert report == other and loss != theirs
