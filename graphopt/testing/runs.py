"""Runs of a graph in a test: on copies of the inputs, on one rank or on several."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import without_autocast
from graphopt.ir.metadata import input_kind
from graphopt.iter_graph import IterGraphModule
from graphopt.replicas import Lockstep, ReplicatedStep
from graphopt.replicas.replica_steps import results_of
from graphopt.testing.comparing import RunValue
from graphopt.testing.ranks import inputs_of_rank

_SEED = 0


def run(
    graph_module: fx.GraphModule, inputs: Sequence[Any], iterations: int
) -> dict[str, RunValue]:
    """Returns everything that `iterations` calls return and leave behind, by description.

    In `fake_ranks` the graph runs for all ranks.

    Args:
        inputs: one value per placeholder, which stays as it is.
    """
    size = _compat.fake_world_size() or 1
    module = _own(graph_module)
    placeholders = module.graph.find_nodes(op="placeholder")
    values = [inputs_of_rank(placeholders, inputs, rank) for rank in range(size)]
    gpus = {v.device for v in values[0] if isinstance(v, torch.Tensor) and v.is_cuda}
    with torch.random.fork_rng(list(gpus)), torch.no_grad(), without_autocast():
        torch.manual_seed(_SEED)  # runs are compared with others that may have been long ago
        return dict(_run(module, placeholders, values, iterations))


def _own(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copies a module if its graph has constants that a run might change, such as generators."""
    if any(node.op in ("get_attr", "call_module") for node in graph_module.graph.nodes):
        return copy.deepcopy(graph_module)
    return graph_module


def _run(
    module: fx.GraphModule,
    placeholders: Sequence[fx.Node],
    values: list[list[Any]],
    iterations: int,
) -> Iterator[tuple[str, RunValue]]:
    starts = [[_kept(value) for value in own] for own in values]
    step = ReplicatedStep(module, Lockstep(len(values))) if len(values) > 1 else None
    for iteration in range(iterations):
        if iteration:
            values = [
                [_next(v, node) for v, node in zip(own, placeholders, strict=True)]
                for own in values
            ]
        last = iteration == iterations - 1
        returned = step(values, last_iter=last) if step else [_call(module, values[0], last)]
        for rank, theirs in enumerate(returned):
            where = f"iteration {iteration}" + (f" on rank {rank}" if step else "")
            for number, value in enumerate(results_of(module.graph, theirs)):
                yield f"result {number} of {where}", RunValue(_kept(value))
    for rank, (own, start) in enumerate(zip(values, starts, strict=True)):
        where = f" on rank {rank}" if step else ""
        for node, value, was in zip(placeholders, own, start, strict=True):
            state = _state(was, node)
            kind = None if state is None else input_kind(node)
            yield f"the final value of {node.name}{where}", RunValue(value, state, kind)


def _call(module: fx.GraphModule, values: Sequence[Any], last: bool) -> Any:
    if isinstance(module, IterGraphModule):
        return module(*values, last_iter=last)
    return module(*values)


def _kept(value: Any) -> Any:
    """Copies a returned value, which may be state that the next iteration updates."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _state(start: Any, node: fx.Node) -> torch.Tensor | None:
    known = isinstance(start, torch.Tensor) and input_kind(node) not in (None, "user_input")
    return start if known else None


def _next(value: Any, node: fx.Node) -> Any:
    """Returns an input of the next iteration."""
    kind = input_kind(node)
    if kind == "hyperparameter":
        return value * 0.9
    if kind == "user_input" and isinstance(value, torch.Tensor) and value.dim():
        return value.roll(1, 0)
    return value
