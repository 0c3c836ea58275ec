"""Graphs of sharded steps on fake ranks, and what they compute there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

import graphopt
from graphopt.ir.placement import placement_of
from graphopt.iter_graph import IterGraphModule
from graphopt.parallel.parallelize import parallelize
from graphopt.replicas import Lockstep, ReplicatedStep
from graphopt.replicas.inputs import random_inputs
from graphopt.replicas.replica_steps import results_of
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from zero_cases import batches, train_step


def sharded_graph(
    build: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    step: Callable[..., Any] = train_step,
    **options: Any,
) -> IterGraphModule:
    """What `graphopt.ZeRO(**options)` makes of a step; in `fake_ranks`."""
    model = build()
    made = optimizer(model.parameters())
    given = next(batches(0, 1))
    step(model, made, *given)
    kind = graphopt.ZeRO(**options)
    captured = capture_call(Call(step, (model, made, *given), {}), communication_for(kind))
    parallelize(captured.graph_module, kind)
    return IterGraphModule(captured.graph_module)


def own_inputs(graph: fx.Graph, ranks: int, seed: int = 0) -> list[list[Any]]:
    """Inputs of each rank; what ranks hold rows of differs."""
    found = random_inputs(graph, ranks, seed)
    placeholders = graph.find_nodes(op="placeholder")
    for rank, values in enumerate(found):
        for node, value in zip(placeholders, values, strict=True):
            if placement_of(node).rows is not None:
                value.mul_(1 + rank / 8)
    return found


def computed(gm: IterGraphModule, ranks: int, iterations: int = 3) -> list[Any]:
    """What a graph returns and leaves after some iterations on all ranks."""
    inputs = own_inputs(gm.graph, ranks)
    run = ReplicatedStep(gm, Lockstep(ranks))
    found: list[Any] = []
    for number in range(iterations):
        returned = run(inputs, last_iter=number + 1 == iterations)
        found += [copy.deepcopy(results_of(gm.graph, each)) for each in returned]
    return [*found, *inputs]


def assert_same_bits(one: list[Any], other: list[Any]) -> None:
    for values, others in zip(one, other, strict=True):
        for a, b in zip(values, others, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def launches(gm: fx.GraphModule, kind: str) -> list[fx.Node]:
    name = f"_c10d_functional.{kind}"
    return [node for node in gm.graph.nodes if str(node.target).startswith(name)]
