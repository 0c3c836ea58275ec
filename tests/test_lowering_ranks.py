"""Lowered steps on real gloo ranks: late work, flushes, communication that stays hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from gloo import Pool
from graphopt.graph_utils import is_collective, is_wait
from graphopt.iter_graph.derive import Derivation, plan
from graphopt.lowering import Options
from graphopt.lowering.extract import RegionCut
from graphopt.lowering.regions import MARK
from zoo import MODELS, OPTIMIZERS, train_step

PIPELINE = "comm_fusion_with_concat(bucket_size_mb=0.001) -> schedule_comm_wait"


def trained(rank: int, pipeline: str, optimizer_name: str, lower: Any) -> Any:
    torch.manual_seed(rank)
    model = MODELS["mlp"].make()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    step = graphopt.compile(train_step, pipeline=pipeline, lower=lower and Options(min_ops=3))
    losses = []
    for index in range(6):
        torch.manual_seed(10 * index + rank)
        losses.append(float(step(model, optimizer, *MODELS["mlp"].batch(2 * index + rank))))
        if index == 3:
            step.flush()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return losses, parameters, step, model


def train_both(rank: int, pipeline: str, optimizer: str) -> dict[str, Any]:
    losses, parameters, *_ = trained(rank, pipeline, optimizer, None)
    lowered_losses, lowered_parameters, step, _model = trained(
        rank, pipeline, optimizer, "inductor"
    )
    torch.testing.assert_close(lowered_losses, losses, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(lowered_parameters, parameters, rtol=1e-4, atol=1e-5)
    assert step.lowered
    assert all(region.is_compiled for region in step.lowered)
    module = step.graph_module
    shared = set(region_names(module.setup_gm)) & set(region_names(module.main_gm))
    return {
        "late": len(module.graph.late),
        "parameters": lowered_parameters,
        "shared": len(shared),
        "hidden": check_hidden(module),
    }


def region_names(derived: fx.GraphModule) -> list[str]:
    return [region.text() for region in RegionCut(derived.graph).regions]


def check_hidden(module: graphopt.IterGraphModule) -> int:
    """Between each launch and its wait runs at least what ran there before; returns how much."""
    checked = 0
    for derive in ("setup", "main"):
        graph = getattr(Derivation(module.graph, plan(module.graph)), derive)()
        before = {node: index for index, node in enumerate(graph.nodes)}
        after = {node: index for index, node in enumerate(RegionCut(graph).ordered)}
        calls = [n for n in before if n.op == "call_function" and not n.meta[MARK].free]
        for launch in filter(is_collective, calls):
            (wait,) = filter(is_wait, launch.users) if any(map(is_wait, launch.users)) else (None,)
            end = len(before) if wait is None else before[wait]
            after_end = len(after) if wait is None else after[wait]
            hidden = {n for n in calls if before[launch] < before[n] < end}
            now = {n for n in calls if after[launch] < after[n] < after_end}
            assert hidden <= now
            checked += len(hidden)
    return checked


@pytest.mark.parametrize(
    ("pipeline", "optimizer"),
    [("default", "sgd-momentum-foreach"), (PIPELINE, "sgd-momentum-fused")],
)
def test_training(two_ranks: Pool, pipeline: str, optimizer: str) -> None:
    first, second = two_ranks.run(train_both, pipeline, optimizer, timeout=280)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert (first["late"] > 0) == (pipeline == "default")
    assert first["shared"] > 0
    assert first["hidden"] > 0
