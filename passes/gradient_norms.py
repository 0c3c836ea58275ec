"""Logs the norm of every gradient in every step, or in every n-th.

    g0 = mm(…)                               g0 = mm(…)
    g1 = mm(…)                               g1 = mm(…)
    w0' = add(w0, g0, -lr)           ==>     n0 = linalg_vector_norm(g0); n1 = …
    …                                        graphopt.callback({"w0": n0, "w1": n1})
                                             w0' = add(w0, g0, -lr)

The norms are those of what the optimizer takes: after the average over ranks, and after clipping.
They are logged before the first update, so that a function that raises ends the step with all
state as it was. Bitwise: nothing that was there changes.

To know a gradient in its own step, the step has to wait for it: no update can run one iteration
late then, and on several ranks that overlap is lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta
from graphopt.host import host_call_of, insert_callback
from graphopt.ir.metadata import phase_of
from graphopt.manager import graph_optimization_pass
from graphopt.optim import gradients_of

logger = logging.getLogger("graphopt")


@graph_optimization_pass(
    whole_step=True,
    apply_after=["comm_fusion_with_concat", "schedule_comm_wait"],
    apply_before=["iter_move_grads_and_optimizers", "schedule_updates"],
)
def log_gradient_norms(
    gm: fx.GraphModule, log: Callable[..., Any] | None = None, every: int = 1
) -> int:
    """Log the norm of every gradient.

    Args:
        log: called with a dictionary from the name of each parameter to the norm of its gradient,
            a tensor without dimensions; None: a line to the logger "graphopt", at level INFO.
        every: log in every n-th step only.

    Returns:
        How many gradients are logged.
    """
    function = log_line if log is None else log
    gradients = gradients_of(gm)
    calls = filter(None, map(host_call_of, gm.graph.nodes))
    if not gradients or any(call.fn is function for call in calls):
        return 0
    with gm.graph.inserting_before(_first_use(gradients)):
        norms = {str(p.target): _norm(gm.graph, g) for p, g in gradients.items()}
        insert_callback(gm.graph, function, norms, every=every)
    return len(norms)


def log_line(norms: Mapping[str, torch.Tensor]) -> None:
    """Logs the norm of all gradients together, and of each."""
    values = {name: float(norm) for name, norm in norms.items()}
    total = math.hypot(*values.values())
    each = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    logger.info("gradient norm %.4g (%s)", total, each)


def _first_use(gradients: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The first optimizer node behind all gradients."""
    last = max(gradients.values())
    node = last.next
    while node.op != "output" and phase_of(node) != "optimizer":
        node = node.next
    return node


def _norm(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    norm = torch.ops.aten.linalg_vector_norm.default
    return call_function_with_meta(graph, norm, (gradient,), like=gradient)
