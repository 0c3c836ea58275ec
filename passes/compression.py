"""Sends gradients in bfloat16.

    cat        = cat([grad_b, view])         cat        = cat([grad_b, view])
    all_reduce = all_reduce(cat)             half       = _to_copy(cat, dtype=bfloat16)
    wait       = wait_tensor(all_reduce) ==> all_reduce = all_reduce(half)
    split      = split(wait, …)              wait       = wait_tensor(all_reduce)
                                             whole      = _to_copy(wait, dtype=float32)
                                             split      = split(whole, …)

Half the bytes travel. What is lost: each rank's gradient, and each sum on the way, is rounded to 8
significant bits, a relative error of up to 2^-9 at each of both; bfloat16 has float32's range, so
that nothing overflows that did not before. `benchmarks/overlap.py --pipelines` shows how far it
takes parameters from DDP's. Parameters stay equal on all ranks: all get the same sums.

Only averages of data parallelism are compressed, not what the step sends itself, nor buffers; and
only float32, which optimizers take back. Not part of the default pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.comm import (
    CommBlock,
    get_all_comm_blocks,
    late_nodes,
    parameters_of,
    replace_collective,
)
from graphopt.graph_utils import call_function_with_meta
from graphopt.manager import graph_optimization_pass

aten = torch.ops.aten


@graph_optimization_pass(
    apply_after=["comm_fusion_with_concat"],
    apply_before=["schedule_comm_wait", "iter_move_grads_and_optimizers"],
    changes_numerics=True,
)
def compress_gradients(gm: fx.GraphModule) -> int:
    """Average float32 gradients in bfloat16.

    Returns:
        How many collectives send half as much.
    """
    late = late_nodes(gm.graph).keys()
    blocks = [
        block
        for block in get_all_comm_blocks(gm, "all_reduce")
        if _can_be_halved(gm, block) and late.isdisjoint(block.node_list)
    ]
    for block in blocks:
        _halve(gm, block)
    return len(blocks)


def _can_be_halved(gm: fx.GraphModule, block: CommBlock) -> bool:
    if block.shape is None or block.dtype is not torch.float32:
        return False
    return block.reduce_op in ("sum", "avg") and bool(parameters_of(gm, block))


def _halve(gm: fx.GraphModule, block: CommBlock) -> None:
    launch, wait = block.comm_node, block.wait_nodes[0]

    def new(target: Any, node: fx.Node, *others: Any, **options: Any) -> fx.Node:
        return call_function_with_meta(gm.graph, target, (node, *others), options, like=launch)

    with gm.graph.inserting_before(launch):
        half = new(aten._to_copy.default, block.inputs[0], dtype=torch.bfloat16)
        sent = new(launch.target, half, *launch.args[1:])
    with gm.graph.inserting_before(wait):
        received = new(wait.target, sent)
        whole = new(aten._to_copy.default, received, dtype=torch.float32)
    replace_collective(gm, block, whole)
