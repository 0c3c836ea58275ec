"""The preemptive bound of a training: what no order of its compute and messages can beat.

Each gradient is one message on a fluid link without latency, sent from when the backward has made
it and due where the next forward reads its parameter; operators as `graphopt.cost.calibrate`
measures them. Both are scaled so that all compute, and all communication, take what they took
alone in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

import graphopt
from graphopt.comm import get_all_comm_blocks
from graphopt.cost import Collective, CostModel, Transfer
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassManager
from graphopt.passes import (
    iter_move_grads_and_optimizers,
    remove_copy_from_optimizer,
    schedule_comm_wait,
)
from graphopt.tracing.call import Call
from graphopt.tracing.capture import CapturedStep


def calibrated(
    captured: CapturedStep, step: Callable[..., Tensor], args: tuple[Any, ...], folder: Path
) -> CostModel:
    """Costs of operators and collectives, measured here and now on all ranks."""
    values = captured.live.live_values(Call(step, args, {}))
    table = folder / f"costs{dist.get_rank()}.json"
    return graphopt.cost.calibrate(captured.graph_module, values, table=table)


def preemptive_bound(
    captured: CapturedStep, costs: CostModel, compute: float, communication: float
) -> tuple[float, float]:
    """Seconds, and those of a step whose compute keeps its order.

    Args:
        captured: not run any more: passes change its graph.
        costs: of its operators.
        compute, communication: seconds that each takes alone.
    """
    module = IterGraphModule(captured.graph_module)
    passes = [remove_copy_from_optimizer, schedule_comm_wait, iter_move_grads_and_optimizers]
    PassManager(passes, verify="off").run(module)
    total = sum(map(costs.compute_seconds, module.graph.nodes))
    sent = sum(block.nbytes for block in get_all_comm_blocks(module))

    def scaled(node: fx.Node) -> float:
        return costs.compute_seconds(node) * compute / total

    def fluid(collective: Collective) -> Transfer:
        return Transfer(0.0, communication * collective.nbytes / sent)

    found = graphopt.simulate(module, CostModel(scaled, fluid))
    return found.preemptive_bound_seconds, found.in_order_bound_seconds
