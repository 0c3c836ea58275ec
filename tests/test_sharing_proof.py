"""What a kind of parallelism makes of markers is proven to be what they mean."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

import graphopt
from graphopt.parallel import DataParallel, OverRanks, Parallel
from graphopt.parallel.data_parallel import average, receive_buffers
from graphopt.parallel.markers import Nodes, group_of, markers_of, marks_gradient, replace_marker
from graphopt.parallel.parallelize import parallelize
from graphopt.testing import fake_ranks
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.tracing.captured_step import CapturedStep
from graphopt.verify.sharding.marker_meaning import sharing_problems
from sketch import one_rank
from zoo import MODELS, OPTIMIZERS, train_step

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Shared = Callable[[Any, Any, Nodes], Any]
"""Makes nodes for a value, its group, and a maker of nodes."""


def captured_step(model: nn.Module, batch: tuple[Any, ...], kind: OverRanks) -> CapturedStep:
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    return capture_call(Call(train_step, (model, optimizer, *batch), {}), communication_for(kind))


@cache
def with_markers(model: str, ranks: int) -> fx.GraphModule:
    """Captured once for all kinds of parallelism, on so many ranks."""
    return captured_step(MODELS[model].make(), MODELS[model].batch(0), DataParallel()).graph_module


def problems_of(kind: Parallel, model: str = "convnet", ranks: int = 2) -> list[Any]:
    with fake_ranks(ranks):
        marked = with_markers(model, ranks)
        shared = fx.GraphModule(marked, graphopt.iter_graph.copy_graph(marked.graph)[0])
        parallelize(shared, kind)
        return list(sharing_problems("averaged", marked.graph, shared))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_data_parallelism_is_proven(
    model: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "graphopt"):
        assert not problems_of(DataParallel(), model, ranks)
    assert "not compared" not in caplog.text


class Layouts(nn.Module):
    """Parameters and buffers that lie in memory in many ways, and some that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.unused = nn.Parameter(torch.randn(3))
        self.single = nn.Parameter(torch.randn(()))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("columns", torch.randn(6, 4).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        rows = self.conv(x).mean((2, 3)) @ (self.turned.t() + self.columns)
        return rows * self.single + self.short.float().sum()


def test_every_layout_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    batch = (torch.randn(2, 3, 5, 5), torch.tensor([1, 2]))
    with fake_ranks(3), caplog.at_level(logging.INFO, "graphopt"):
        captured = captured_step(Layouts(), batch, DataParallel())
        marked, _ = graphopt.iter_graph.copy_graph(captured.graph_module.graph)
        parallelize(captured.graph_module, DataParallel())
        assert not list(sharing_problems("averaged", marked, captured.graph_module))
    assert "not compared" not in caplog.text


# Other ways of the same


@dataclass(frozen=True)
class Kind(DataParallel):
    """Data parallelism with other ways to share a gradient, and the buffers of a module."""

    gradient: Shared = average
    buffers: Shared = receive_buffers

    def expand(self, graph: fx.Graph) -> int:
        markers = markers_of(graph)
        for marker in markers:
            shared = self.gradient if marks_gradient(marker) else self.buffers
            replace_marker(marker, shared(marker.args[0], group_of(marker), Nodes(marker)))
        return len(markers)


def summed(value: Any, group: Any, call: Nodes, op: str = "sum") -> Any:
    launched = call(c10d.all_reduce.default, value, op, group.name)
    return call(c10d.wait_tensor.default, launched)


def flattened(gradient: Any, group: Any, call: Nodes) -> Any:
    value = gradient.meta["val"]
    if not value.is_contiguous():
        return average(gradient, group, call)
    flat = call(aten.view.default, gradient, [-1])
    total = summed(call(aten.mul.Tensor, flat, 1 / group.ranks), group, call)
    return call(aten.view.default, total, list(value.shape))


def one_by_one(buffers: Any, group: Any, call: Nodes) -> Any:
    return [receive_buffers([buffer], group, call)[0] for buffer in buffers]


def put_in_order(graph: fx.Graph) -> None:
    """Let what has moved stand before its readers."""
    ordered: dict[fx.Node, None] = {}

    def put(node: fx.Node) -> None:
        for read in node.all_input_nodes:
            if read not in ordered:
                put(read)
        ordered[node] = None

    for node in graph.nodes:
        if node not in ordered:
            put(node)
    nodes = list(ordered)
    for before, node in pairwise(nodes):
        before.append(node)


class InOneBucket(DataParallel):
    """All gradients of a step in one all-reduce, behind the last of them."""

    def expand(self, graph: fx.Graph) -> int:
        markers = markers_of(graph)
        gradients = [m for m in markers if marks_gradient(m) and m.meta["val"].is_contiguous()]
        for marker in markers:
            if marker not in gradients:
                shared = average if marks_gradient(marker) else receive_buffers
                call = Nodes(marker)
                replace_marker(marker, shared(marker.args[0], group_of(marker), call))  # type: ignore[operator]
        last, group = gradients[-1], group_of(gradients[-1])
        call = Nodes(last)
        flat = [call(aten.view.default, m.args[0], [-1]) for m in gradients]
        part = call(aten.mul.Tensor, call(aten.cat.default, flat), 1 / group.ranks)
        sizes = [m.meta["val"].numel() for m in gradients]
        items = call(aten.split_with_sizes.default, summed(part, group, call), sizes)
        for marker, item in zip(gradients, items, strict=True):
            marker.replace_all_uses_with(
                call(aten.view.default, item, list(marker.meta["val"].shape))
            )
            graph.erase_node(marker)
        put_in_order(graph)
        return len(markers)


RIGHT: dict[str, Parallel] = {
    "flattened": Kind(gradient=flattened),
    "buffers one by one": Kind(buffers=one_by_one),
    "in one bucket": InOneBucket(),
    "a copy of it": Kind(
        gradient=lambda g, group, call: average(call(aten.clone.default, g), group, call)
    ),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_other_ways_of_the_same_are_proven(kind: str) -> None:
    assert not problems_of(RIGHT[kind])


# What is not the same


def scaled(factor: float) -> Shared:
    return lambda g, group, call: summed(call(aten.mul.Tensor, g, factor), group, call)


WRONG: dict[str, Parallel] = {
    "a sum": Kind(gradient=summed),
    "another factor": Kind(gradient=scaled(0.25)),
    "nothing shared": Kind(gradient=lambda g, group, call: g),
    "scaled alone": Kind(gradient=lambda g, group, call: call(aten.mul.Tensor, g, 1 / group.ranks)),
    "the largest": Kind(
        gradient=lambda g, group, call: summed(
            call(aten.mul.Tensor, g, 1 / group.ranks), group, call, "max"
        )
    ),
    "averaged twice": Kind(
        gradient=lambda g, group, call: average(average(g, group, call), group, call)
    ),
    "scaled after the sum": Kind(
        gradient=lambda g, group, call: call(
            aten.mul.Tensor, summed(g, group, call), 1 / group.ranks
        )
    ),
    "in another precision": Kind(
        gradient=lambda g, group, call: call(
            torch.ops.prims.convert_element_type.default,
            average(
                call(torch.ops.prims.convert_element_type.default, g, torch.bfloat16), group, call
            ),
            torch.float32,
        )
    ),
    "buffers of their own": Kind(buffers=lambda buffers, group, call: list(buffers)),
    "buffers of another rank": Kind(
        buffers=lambda buffers, group, call: [
            call(c10d.wait_tensor.default, call(c10d.broadcast.default, buffer, 1, group.name))
            for buffer in buffers
        ]
    ),
    "buffers summed": Kind(
        buffers=lambda buffers, group, call: [summed(b, group, call) for b in buffers]
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_markers_do_not_mean_is_refused(kind: str) -> None:
    assert problems_of(WRONG[kind])


def test_a_gradient_for_another_is_refused() -> None:
    class Exchanged(DataParallel):
        def expand(self, graph: fx.Graph) -> int:
            marked = [m for m in markers_of(graph) if marks_gradient(m)]
            pairs = [
                (a, b)
                for a in marked
                for b in marked
                if a < b and a.meta["val"].shape == b.meta["val"].shape
            ]
            first, second = pairs[0]
            given = first.args[0], second.args[0]
            first.args = (given[1], *first.args[1:])
            second.prepend(first)
            second.args = (given[0], *second.args[1:])
            put_in_order(graph)
            return super().expand(graph)

    assert problems_of(Exchanged(), "mlp")


def test_a_step_is_refused_where_a_kind_is_wrong() -> None:
    step = graphopt.compile(train_step, pipeline="none", parallel=WRONG["nothing shared"])
    model = MODELS["mlp"].make()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    with one_rank(), pytest.raises(graphopt.VerificationError) as caught:
        step(model, optimizer, *MODELS["mlp"].batch(0))
    assert str(caught.value).startswith("stage 'parallelize' was refused: ")


def test_a_kind_of_another_meaning_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    class Unsaid(Kind):
        meaning: ClassVar[str] = ""

    with one_rank(), caplog.at_level(logging.INFO, "graphopt"):
        step = graphopt.compile(train_step, pipeline="none", parallel=Unsaid(gradient=summed))
        model = MODELS["mlp"].make()
        step(model, OPTIMIZERS["adamw-fused"](model.parameters()), *MODELS["mlp"].batch(0))
    assert "values shared between ranks are not checked" in caplog.text
