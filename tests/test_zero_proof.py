"""Proof of a sharded graph: it is the step of one device; hundreds of wrong graphs are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.placement import placement_of
from graphopt.iter_graph import copy_graph
from graphopt.parallel.parallelize import parallelize
from graphopt.testing import fake_ranks
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.verify.sharding.marker_meaning import sharing_problems
from zero_cases import Uneven, batches, clipped_step
from zero_edits import ILLEGAL, LEGAL

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=False),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=False),
    "radam": lambda p: torch.optim.RAdam(p, foreach=False),
}


def expanded(
    optimizer: str, stage: int, ranks: int = 2, keep_mb: float | None = 0
) -> tuple[fx.Graph, fx.GraphModule]:
    """A marked graph, and what the kind makes of it, with as many gathers as there can be."""
    model = Uneven()
    made = OPTIMIZERS[optimizer](model.parameters())
    given = next(batches(0, 1))
    clipped_step(model, made, *given)
    kind = graphopt.ZeRO(stage=stage, keep_mb=keep_mb)
    call = Call(clipped_step, (model, made, *given), {})
    captured = capture_call(call, communication_for(kind))
    marked, _ = copy_graph(captured.graph_module.graph)
    parallelize(captured.graph_module, kind)
    return marked, captured.graph_module


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_shown_to_be_the_step(optimizer: str, stage: int) -> None:
    with fake_ranks(3 if optimizer == "sgd" else 2) as ranks:
        marked, gm = expanded(optimizer, stage, ranks.size, keep_mb=None)
        assert [str(problem) for problem in sharing_problems("sharded", marked, gm)] == []


@pytest.mark.parametrize("stage", [1, 3])
def test_decisions_keep_the_rows_of_state(stage: int) -> None:
    """An assumption reads state so that nothing is overwritten before it: nothing is gathered for
    that, and what is gathered would be no such reader."""
    with fake_ranks(2):
        _, gm = expanded("radam", stage)
        assumptions = [node for node in gm.graph.nodes if isinstance(node.target, Assumption)]
        assert assumptions
        cut = {p for p in gm.graph.find_nodes(op="placeholder") if placement_of(p).rows == 0}
        assert cut
        assert all(cut.issubset(node.all_input_nodes) for node in assumptions)
        gathers = called(gm.graph, "all_gather_into_tensor")
        once, again = 2, 1 if stage == 3 else 0
        assert len(gathers) == once + again


def called(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if name in str(node.target)]


def changed_argument(name: str, index: int, change: Callable[[Any], Any]) -> Any:
    """Wrong variations: one for each call of an operator, an argument of which is changed."""

    def variations(graph: fx.Graph) -> Iterator[None]:
        for node in called(graph, name):
            before = node.args
            node.args = (*before[:index], change(before[index]), *before[index + 1 :])
            yield
            node.args = before

    return variations


def stale_gathers(graph: fx.Graph) -> Iterator[None]:
    """Each parameter is gathered before its update."""
    for node in called(graph, "all_gather_into_tensor"):
        for other in called(graph, "graphopt_shards.window"):
            same = other.meta["val"].shape == node.args[0].meta["val"].shape
            if same and other < node and other is not node.args[0]:
                before = node.args
                node.args = (other, *before[1:])
                yield
                node.args = before


def swapped_scatters(graph: fx.Graph) -> Iterator[None]:
    """Rows of another gradient."""
    sums = called(graph, "sum_of_ranks")
    for one, other in pairwise(sums):
        before = one.args
        one.args = (other.args[0], one.args[1])
        yield
        one.args = before


VARIATIONS = {
    "another rank's rows": changed_argument("graphopt_shards.window", 1, lambda s: s[::-1]),
    "padding in a norm": changed_argument("graphopt_shards.owned", 1, lambda s: [0] * len(s)),
    "a missing scale": changed_argument("aten.mul.Tensor", 1, lambda s: 1.0 if s == 0.5 else 3.0),
    "a stale gather": stale_gathers,
    "another gradient": swapped_scatters,
    "fewer ranks": changed_argument("sum_of_ranks", 1, lambda ranks: ranks - 1),
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_wrong_graphs_are_refused(variation: str) -> None:
    with fake_ranks(2):
        marked, gm = expanded("adamw fused", 1)
        tried = 0
        for _ in VARIATIONS[variation](gm.graph):
            assert list(sharing_problems("sharded", marked, gm)), variation
            tried += 1
        assert tried
        assert list(sharing_problems("sharded", marked, gm)) == []


CASES = [("adamw fused", 1, 2), ("adamw foreach", 3, 2), ("sgd", 1, 3), ("adamw loop", 3, 3)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", ILLEGAL)
@pytest.mark.parametrize(("optimizer", "stage", "ranks"), CASES)
def test_wrong_ones_are_refused(optimizer: str, stage: int, ranks: int, edit: str) -> None:
    with fake_ranks(ranks):
        marked, gm = expanded(optimizer, stage, ranks)
        accepted = [
            what
            for what in ILLEGAL[edit](gm.graph)
            if not list(sharing_problems("sharded", marked, gm))
        ]
        assert accepted == []
        assert list(sharing_problems("sharded", marked, gm)) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("edit", LEGAL)
@pytest.mark.parametrize(("optimizer", "stage", "ranks"), CASES)
def test_right_ones_are_accepted(optimizer: str, stage: int, ranks: int, edit: str) -> None:
    with fake_ranks(ranks):
        marked, gm = expanded(optimizer, stage, ranks)
        tried = 0
        for what in LEGAL[edit](gm.graph):
            found = [str(problem) for problem in sharing_problems("sharded", marked, gm)]
            assert found == [], what
            tried += 1
        assert tried
