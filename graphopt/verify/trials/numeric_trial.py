"""A numeric trial of two graphs on random inputs, for all replicas.

A trial decides nothing. It tells the author of a pass that was refused whether the pass is wrong or
a rule of the proof is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import get_outputs, is_collective, tensors_in
from graphopt.ir.generators import generators_apart
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.replicas import Lockstep, ReplicatedStep
from graphopt.replicas.inputs import random_inputs
from graphopt.replicas.replica_steps import results_of
from graphopt.verify.trials.forked_process import EndedError, run_in_fork

TRIALS = 8
DIFFERENT = "different on random inputs"
"""The start of a verdict that random inputs tell two graphs apart."""

_ITERATIONS = 2
_MOST_SECONDS = 5.0
_MOST_NODES = 20_000
_MOST_BYTES = 1 << 28
_MOST_REPLICAS = 8


@dataclass(frozen=True)
class LargestDifference:
    """The largest difference between two runs.

    Attributes:
        size: of the difference in any element; infinite where shapes or dtypes differ.
        where: the result or the piece of state that has it.
    """

    size: float
    where: str

    def __str__(self) -> str:
        return f"max |Δ| = {self.size:.3g} in `{self.where}`"


def verdict(before: fx.GraphModule, after: fx.GraphModule, *, of_values: bool = True) -> str | None:
    """Returns a sentence that says if random inputs tell two graphs apart.

    Graphs run for as many replicas as their process group has ranks (two, where there is no group),
    whose collectives combine the values of all. Callbacks are not called; random numbers of the
    program go on as if nothing had run.

    Args:
        before, after: graphs with the same placeholders and with metadata; neither changes.
        of_values: True if the refusal is about computed values, so that a rule may be missing if no
            difference is found, and not about metadata or waits.

    On CPUs, they run in a copy of this process: with positions that are not there, some kernels
    write where they must not.

    Returns:
        None where no trial could be made: a graph cannot be run here, is too large for it, or gives
        numbers that are not finite.
    """
    try:
        found = _found(before, after)
    except EndedError as error:
        return f"no trial was made: {error}" if error.by_signal else None
    except Exception:  # it is the refusal that matters: a graph that is wrong need not even run
        return None
    gaps = [gap for gap in found if gap is not None]
    if gaps:
        return f"{DIFFERENT}: {gaps[0]}"
    if not found:
        return None
    trials = "1 trial" if len(found) == 1 else f"{len(found)} trials"
    missing = "; a rule may be missing" if of_values else ""
    return f"no difference in {trials} on random inputs{missing}"


def _found(before: fx.GraphModule, after: fx.GraphModule) -> list[LargestDifference | None]:
    if _devices(before.graph) | _devices(after.graph) <= {"cpu"}:
        return run_in_fork(lambda: list(_trials(before, after)), 4 * _MOST_SECONDS)
    return list(_trials(before, after))


def _devices(graph: fx.Graph) -> set[str]:
    values = (tensors_in(known_value(node)) for node in graph.nodes)
    return {tensor.device.type for found in values for tensor in found}


def _trials(before: fx.GraphModule, after: fx.GraphModule) -> Iterator[LargestDifference | None]:
    """Yields the gap of each conclusive trial, up to the first that finds a difference."""
    if [*map(len, get_outputs(before.graph))] != [*map(len, get_outputs(after.graph))]:
        return  # equal numbers would not excuse it
    groups = _groups([before.graph, after.graph])
    count = max((max(ranks) + 1 for ranks in groups.values()), default=1)
    if not _is_small(before.graph, count) or not _is_small(after.graph, count):
        return
    end = time.monotonic() + _MOST_SECONDS
    for seed in range(TRIALS):
        old = _run(before, random_inputs(before.graph, count, seed), groups)
        new = _run(after, random_inputs(before.graph, count, seed), groups)
        if all(map(_is_finite, old.values())):
            gap = _largest_gap(old, new)
            yield gap
            if gap is not None:
                return
        if time.monotonic() > end:
            return


def _groups(graphs: Sequence[fx.Graph]) -> Mapping[str, Sequence[int]]:
    """Returns the ranks of each process group by name; two ranks where there are no groups."""
    found = {}
    for graph in graphs:
        for node in graph.nodes:
            if is_collective(node):
                name = str(argument(node, "group_name"))
                size = argument(node, "group_size") or 2
                there = _compat.ranks_of_group(name) if dist.is_initialized() else None
                found[name] = range(int(size)) if there is None else there
    return found


def _is_small(graph: fx.Graph, count: int) -> bool:
    held = [known_value(node) for node in graph.find_nodes(op="placeholder")]
    size = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    return (
        count <= _MOST_REPLICAS and len(graph.nodes) <= _MOST_NODES and size * count <= _MOST_BYTES
    )


def _run(
    gm: fx.GraphModule, inputs: list[list[Any]], groups: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Runs some iterations and returns the results and the final state by name."""
    step = ReplicatedStep(gm, Lockstep(len(inputs), groups, callbacks=False))
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    found = {}
    devices = {value.device for row in inputs for value in row if isinstance(value, torch.Tensor)}
    with generators_apart(devices):
        for iteration in range(_ITERATIONS):
            returned = step(inputs, last_iter=iteration == _ITERATIONS - 1)
            for rank, values in enumerate(returned):
                for number, value in enumerate(results_of(gm.graph, values)):
                    key = f"result {number} of iteration {iteration} on rank {rank}"
                    found[key] = value.clone() if isinstance(value, torch.Tensor) else value
    for rank, row in enumerate(inputs):
        end = f" on rank {rank}" if rank else ""
        found |= {f"{name}{end}": value for name, value in zip(names, row, strict=True)}
    return found


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def _largest_gap(old: Mapping[str, Any], new: Mapping[str, Any]) -> LargestDifference | None:
    gaps = [gap for name in old if (gap := _gap(old[name], new.get(name), name)) is not None]
    state = [gap for gap in gaps if not gap.where.startswith("result ")]
    return max(state or gaps, key=lambda gap: gap.size, default=None)


def _gap(one: Any, other: Any, where: str) -> LargestDifference | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if one == other else LargestDifference(float("inf"), where)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return LargestDifference(float("inf"), where)
    if torch.equal(one, other):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    return LargestDifference(
        float((one.to(wide) - other.to(wide)).abs().nan_to_num(torch.inf).max()), where
    )


def module_of(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module with the attributes of `gm` and another graph, such as that before a
    pass."""
    copied, _ = copy_graph(graph)
    plain = fx.GraphModule(gm, copied)
    return IterGraphModule(plain) if isinstance(gm, IterGraphModule) else plain
