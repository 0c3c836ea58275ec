"""Five further passes as users write them; `python examples/five_further_passes.py` tests each.

norm_over_buckets    clip by one norm of each bucket in place of one of each gradient in it
scatter_and_gather   an all-reduce as a reduce-scatter and an all-gather: proven to be the same
fold_decay           AdamW's decay as one multiplication of the parameters before its update
recompute_gelu       GELU once more in the backward in place of keeping its result
late_embedding       wait for the gradient of an embedding in the next iteration
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import (
    bucket_members,
    get_all_comm_blocks,
    parameters_of,
    replace_collective,
    updates_of,
)
from graphopt.graph_utils import call_function_with_meta, find_nodes, is_operator, phase_of
from graphopt.iter_graph import IterGraphModule
from graphopt.passes import comm_fusion_with_concat
from graphopt.testing import check_pass, fake_ranks

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def new(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the insertion point."""
    return call_function_with_meta(gm.graph, target, args, kwargs, like=like)


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return find_nodes(gm.graph, lambda node: is_operator(node.target, f"aten::{name}"))


@graphopt.graph_optimization_pass([comm_fusion_with_concat], changes_numerics=True)
def norm_over_buckets(gm: fx.GraphModule) -> int:
    """Clip by one norm of each bucket as it is received, in place of one of each gradient in it."""
    changed = 0
    for stack in calls(gm, "stack"):
        norms = {gradient_of(norm): norm for norm in stack.args[0]}  # type: ignore[union-attr]
        one, joined = next(iter(norms.values())), []
        for block in get_all_comm_blocks(gm, "all_reduce"):
            members = [norms.keys() & member.received for member in bucket_members(block)]
            if len(members) < 2 or not all(members):
                continue
            with gm.graph.inserting_before(stack):
                bucket = block.wait_nodes[0]
                joined.append(new(gm, one, aten.linalg_vector_norm.default, bucket))
            for gradient in set().union(*members):
                del norms[gradient]
            changed += len(members)
        if joined:
            with gm.graph.inserting_before(stack):
                new_norms = [*joined, *norms.values()]
                stacked = new(gm, stack, stack.target, new_norms, *stack.args[1:])
            stack.replace_all_uses_with(stacked)
    return changed


def gradient_of(norm: fx.Node) -> fx.Node:
    """The gradient whose norm a node is, alone or as an item of a list of norms."""
    source = norm.all_input_nodes[0]
    if is_operator(source.target, "aten::_foreach_norm"):
        return source.args[0][norm.args[1]]  # type: ignore[index, return-value]
    return source


@graphopt.graph_optimization_pass(changes_communication=True)
def scatter_and_gather(gm: fx.GraphModule, least: int = 64) -> int:
    """Send gradients of `least` elements and more by reduce-scatter and all-gather."""
    changed = 0
    for block in get_all_comm_blocks(gm, "all_reduce"):
        sent, size = block.inputs[0], block.group_size
        count = sent.meta["val"].numel()
        if count < least or count % size:
            continue
        shape = list(sent.meta["val"].shape)
        with gm.graph.inserting_before(block.wait_nodes[0]):
            like, group = block.comm_node, (size, block.group)
            row = new(gm, like, aten.reshape.default, sent, [-1])
            scatter = c10d.reduce_scatter_tensor.default
            part = new(gm, like, scatter, row, block.reduce_op, *group)
            part = new(gm, like, c10d.wait_tensor.default, part)
            whole = new(gm, like, c10d.all_gather_into_tensor.default, part, *group)
            whole = new(gm, like, c10d.wait_tensor.default, whole)
            replace_collective(gm, block, new(gm, like, aten.view.default, whole, shape))
        changed += 1
    return changed


@graphopt.graph_optimization_pass(changes_numerics=True)
def fold_decay(gm: fx.GraphModule) -> int:
    """Decay parameters before the fused update, which then has no decay of its own."""
    changed = 0
    for update in calls(gm, "_fused_adamw"):
        decay, rate = update.kwargs["weight_decay"], update.kwargs["lr"]
        if not isinstance(decay, fx.Node):
            continue
        parameters = list(update.args[0])  # type: ignore[arg-type]
        with gm.graph.inserting_before(update):
            share = new(gm, update, aten.mul.Tensor, rate, decay)
            factor = new(gm, update, aten.rsub.Scalar, share, 1.0)
            decayed = [new(gm, update, aten.mul.Tensor, p, factor) for p in parameters]
        update.args = (decayed, *update.args[1:])
        update.kwargs = {**update.kwargs, "weight_decay": 0.0}
        changed += len(parameters)
    return changed


@graphopt.graph_optimization_pass()
def recompute_gelu(gm: fx.GraphModule) -> int:
    """Compute GELU again just before the backward reads it: its result need not be kept."""
    changed = 0
    for gelu in calls(gm, "gelu"):
        readers = [user for user in through_views(gelu) if phase_of(user) == "backward"]
        if phase_of(gelu) == "backward" or not readers:
            continue
        with gm.graph.inserting_before(min(readers)):
            again = new(gm, min(readers), gelu.target, *gelu.args, **gelu.kwargs)
            copies = {gelu: again}

            def copied(node: fx.Node, copies: dict[fx.Node, fx.Node] = copies) -> fx.Node:
                return copies.get(node, node)

            for view in views_of(gelu):
                copies[view] = gm.graph.node_copy(view, copied)
        for reader in readers:
            reader.args = fx.map_arg(reader.args, copied)
        changed += 1
    return changed


def views_of(node: fx.Node) -> list[fx.Node]:
    """Views of a node, directly or through views, in graph order."""
    found = [node]
    for member in found:  # grows while it is read
        names = ("aten::t", "aten::view", "aten::permute", "aten::transpose")
        found += [user for user in member.users if is_operator(user.target, *names)]
    return sorted(found[1:])


def through_views(node: fx.Node) -> list[fx.Node]:
    views = views_of(node)
    return [user for read in (node, *views) for user in read.users if user not in views]


@graphopt.graph_optimization_pass()
def late_embedding(gm: IterGraphModule, parameter: str = "0.weight") -> int:
    """Wait for the gradient of an embedding, and update it, in the next iteration."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        if parameter not in parameters_of(gm, block) or gm.graph.is_late(block.wait_nodes[0]):
            continue
        nodes = [*block.tail, *updates_of(gm, block)]
        reason = gm.graph.can_move_late(nodes)
        if reason is None:
            gm.graph.move_to_next_iter_before(nodes)
            return 1
        graphopt.note(f"{parameter} is not updated late: {reason}")
    return 0


class Mean(nn.Module):
    """The mean over words."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    loss = model(words).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    loss = model(words).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(scale: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(0)
    width = 16 * scale
    first, second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    layers = first, nn.GELU(), second, nn.GELU(), nn.Linear(width, 8)
    model = nn.Sequential(nn.Embedding(64 * scale, width), *layers, Mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    return model, optimizer, torch.randint(64 * scale, (4 * scale, 6 * scale))


PASSES: list[tuple[Any, Callable[..., Any], dict[str, Any]]] = [
    (norm_over_buckets, clipped_step, {"changes": 7}),
    (scatter_and_gather, train_step, {}),
    (fold_decay, train_step, {"changes": 7}),
    (recompute_gelu, train_step, {"changes": 2, "idempotent": False}),
    (late_embedding, train_step, {"changes": 1}),
]


def main() -> None:
    with fake_ranks(2):
        for pass_, step, options in PASSES:
            start = time.perf_counter()
            record = check_pass(step, arguments(), pass_, **options)
            print(f"{time.perf_counter() - start:5.2f} s  {record}")


if __name__ == "__main__":
    main()
