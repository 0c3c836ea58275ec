"""Prediction of a step's time on numbers of ranks and a network, from its captured graph."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import graphopt
from graphopt import _compat, passes
from graphopt.comm import get_all_comm_blocks
from graphopt.cost import NETWORKS, CostModel, Network, calibrate, default_cost_model
from graphopt.errors import GraphOptError
from graphopt.estimate.measure import DDP_BUCKETS_MB
from graphopt.estimate.target import StepCalls
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value
from graphopt.iter_graph import IterGraphModule
from graphopt.manager.discovery import PassManager
from graphopt.schedule import Timeline, collectives_by_cost, program_of, simulate
from graphopt.schedule.program import peak_bytes
from graphopt.stages.pipelines import HELD_BACK, pipeline_with
from graphopt.testing import fake_ranks

_UNITS = {"": 1e6, "mbit": 1e6, "gbit": 1e9}
_PAYLOAD = 0.95
"""The share of a link's bits that are not headers."""
_CORE_SECONDS_PER_BYTE = 0.85e-9
"""Core-seconds that gloo takes for each byte which a rank sends while it receives one."""
_MOST_OF_A_CORE = 0.5
"""A link too fast for gloo is not faster than this lets it be."""
_AT_ONCE = 2
"""The number of collectives of a group that gloo runs at the same time, on two threads."""


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds and bytes of a step on one number of ranks.

    Attributes:
        ddp: the step of DistributedDataParallel, by bucket size in MB.
        ours: the step of the default passes.
        peak_bytes: the peak bytes of the step's intermediate values, of DDP and of graphopt.
    """

    ranks: int
    compute: float
    communication: float
    ddp: dict[float, float]
    ours: float
    peak_bytes: tuple[int, int]

    @property
    def bound(self) -> float:
        """The lower bound of the step's seconds: compute or communication alone."""
        return max(self.compute, self.communication)

    @property
    def best_bucket(self) -> float:
        """The bucket size in MB with which DistributedDataParallel is predicted to be fastest."""
        return min(self.ddp, key=self.ddp.__getitem__)


def network_named(text: str) -> Network:
    """The network of that name in `graphopt.cost.NETWORKS`, or an Ethernet of that many Mbit/s.

    Raises:
        GraphOptError: `text` is neither a name nor a rate such as ``600``, ``600mbit``, ``25gbit``.
    """
    if text in NETWORKS:
        return NETWORKS[text]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit|)", text.strip().lower())
    bits = float(found[1]) * _UNITS[found[2]] if found else 0
    if not bits:
        raise GraphOptError(
            f"--network {text!r}: write {', '.join(NETWORKS)}, or a rate such as 600mbit or 25gbit"
        )
    return replace(NETWORKS["ethernet"], name=text, bytes_per_second=_PAYLOAD * bits / 8)


def captured_for_ranks(calls: StepCalls) -> fx.GraphModule:
    """Captures the second step of a script as a graph that averages its gradients.

    Runs the first one here, on copies of the arguments; no other rank is needed.

    Raises:
        CaptureError: graphopt cannot capture the step.
    """
    (batch,) = calls.next_batches(1)
    arguments, batch, keywords = copy.deepcopy((calls.arguments, batch, calls.keywords))
    calls.function(*arguments, *batch, **keywords)  # optimizers make their state
    with nullcontext() if dist.is_initialized() else fake_ranks(2):
        return graphopt.capture(
            calls.function, *arguments, *batch, parallel=graphopt.DataParallel(), **keywords
        ).graph_module


def compute_costs(gm: fx.GraphModule) -> CostModel:
    """The costs of a graph's operators: measured, or from data sheets if its tensors are fake."""
    tensors = [
        tensor
        for node in gm.graph.find_nodes(op="placeholder")
        for tensor in tensors_in(known_value(node))
    ]
    here = all(t.device.type == "cpu" or torch.cuda.is_available() for t in tensors)
    if not here or _compat.is_fake(torch.empty(0)) or dist.is_initialized():
        return default_cost_model(gm.graph)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        return calibrate(_of_one_rank(gm), table=Path(folder) / "costs.json")


def _of_one_rank(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph in which each collective returns its input, to run on one rank."""
    alone = copy.deepcopy(gm)
    for block in get_all_comm_blocks(alone):
        for wait, sent in zip(block.wait_nodes, block.comm_node.all_input_nodes, strict=True):
            wait.replace_all_uses_with(sent)
            alone.graph.erase_node(wait)
        alone.graph.erase_node(block.comm_node)
    alone.recompile()
    return alone


def predict(
    gm: fx.GraphModule, costs: CostModel, network: Network, ranks: Sequence[int]
) -> Iterator[Prediction]:
    """Returns one prediction for each number of ranks.

    Args:
        gm: the graph of a step that averages its gradients (`captured_for_ranks`); left unchanged.
        costs: whose compute counts.
    """
    if _by_gloo(gm):
        network = replace(network, at_once=_AT_ONCE)
    here = CostModel(costs.compute, network, slowdown_of(gm, network))
    for count in ranks:
        yield _prediction(gm, here, count)


def slowdown_of(gm: fx.GraphModule, network: Network) -> float:
    """The share by which compute slows down during communication, which needs CPU threads with
    gloo."""
    if not _by_gloo(gm):
        return 0.0
    taken = min(_MOST_OF_A_CORE, _CORE_SECONDS_PER_BYTE * network.bytes_per_second)
    return taken / (1 - taken)


def _by_gloo(gm: fx.GraphModule) -> bool:
    """True if all that a graph sends is on the CPU."""
    sent = [known_value(block.comm_node) for block in get_all_comm_blocks(gm)]
    return all(tensor.device.type == "cpu" for tensor in tensors_in(sent))


def _prediction(gm: fx.GraphModule, costs: CostModel, ranks: int) -> Prediction:
    ddp: dict[float, float] = {}
    peaks: dict[float, int] = {}
    for size in DDP_BUCKETS_MB:
        timeline, peaks[size] = _simulated(gm, _as_ddp(size), costs, ranks)
        ddp[size] = timeline.step_seconds
    launches = [block.comm_node for block in get_all_comm_blocks(gm, "all_reduce")]
    by_table = CostModel(default_cost_model(gm.graph).compute, costs.communication)
    buckets = collectives_by_cost(gm.graph, launches, by_table, ranks)  # as the default decides
    ours, peak = _simulated(gm, pipeline_with(buckets, HELD_BACK), costs, ranks)
    best = min(ddp, key=ddp.__getitem__)
    return Prediction(
        ranks, ours.compute_seconds, ours.comm_seconds, ddp, ours.step_seconds, (peaks[best], peak)
    )


def _as_ddp(bucket_size_mb: float) -> list[Any]:
    """A pipeline that sends gradients as DistributedDataParallel does, with nothing late."""
    return [
        passes.remove_copy_from_optimizer,
        (passes.comm_fusion_with_concat, {"bucket_size_mb": bucket_size_mb}),
        passes.schedule_comm_wait,
    ]


def _simulated(
    gm: fx.GraphModule, pipeline: list[Any], costs: CostModel, ranks: int
) -> tuple[Timeline, int]:
    module = IterGraphModule(copy.deepcopy(gm))
    PassManager(pipeline, verify="off").run(module)
    timeline = simulate(module, costs, world_size=ranks)
    return timeline, peak_bytes(program_of(module.graph, costs, ranks))
