"""Seven passes as users write them; `python examples/seven_passes.py` tests each, on two ranks that
are not there.

    compress_bf16       gradients travel as bfloat16
    split_all_reduces   each large all-reduce becomes two
    first_layers_first  launch in the order in which the next forward needs the parameters
    log_norms           a function sees the norm of each gradient in every step
    fuse_attention      scaled_dot_product_attention in place of written-out attention
    chunk_buckets       all gradients in one row, sent in chunks of one size
    update_late         wait for one gradient, and update its parameter, in the next iteration
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import graphopt
from graphopt.comm import (
    CommBlock,
    get_all_comm_blocks,
    parameters_of,
    replace_collective,
    updates_of,
)
from graphopt.graph_utils import call_function_with_meta, move_before
from graphopt.host import insert_callback
from graphopt.iter_graph import IterGraphModule
from graphopt.optim import gradients_of
from graphopt.testing import StepUnderTest, fake_ranks

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def new(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the insertion point."""
    return call_function_with_meta(gm.graph, target, args, kwargs, like=like)


def launched(gm: fx.GraphModule, block: CommBlock, value: fx.Node) -> fx.Node:
    """The launch of an all-reduce like that of a block for another value."""
    return new(gm, block.comm_node, c10d.all_reduce.default, value, *block.comm_node.args[1:])


def received(gm: fx.GraphModule, launch: fx.Node) -> fx.Node:
    """The wait for a launch."""
    return new(gm, launch, c10d.wait_tensor.default, launch)


@graphopt.graph_optimization_pass(changes_numerics=True)
def compress_bf16(gm: fx.GraphModule) -> int:
    """Send float32 gradients as bfloat16, launched and awaited where they were."""
    cast = aten._to_copy.default
    blocks = [b for b in get_all_comm_blocks(gm, "all_reduce") if b.dtype == torch.float32]
    for block in blocks:
        with gm.graph.inserting_before(block.comm_node):
            half = new(gm, block.comm_node, cast, block.inputs[0], dtype=torch.bfloat16)
            launch = launched(gm, block, half)
        with gm.graph.inserting_before(block.wait_nodes[0]):
            whole = new(gm, launch, cast, received(gm, launch), dtype=torch.float32)
            replace_collective(gm, block, whole)
    return len(blocks)


def send_in_parts(gm: fx.GraphModule, block: CommBlock, sizes: Sequence[int]) -> None:
    """Let an all-reduce be sent in parts of so many elements."""
    like, value = block.comm_node, block.inputs[0]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    with gm.graph.inserting_before(block.comm_node):
        row = new(gm, like, aten.reshape.default, value, [-1])
        launches = [
            launched(gm, block, new(gm, like, aten.slice.Tensor, row, 0, end - size, end))
            for size, end in zip(sizes, ends, strict=True)
        ]
    with gm.graph.inserting_before(block.wait_nodes[0]):
        joined = new(gm, like, aten.cat.default, [received(gm, launch) for launch in launches])
        shape = list(value.meta["val"].shape)
        replace_collective(gm, block, new(gm, like, aten.view.default, joined, shape))


@graphopt.graph_optimization_pass()
def split_all_reduces(gm: fx.GraphModule, least: int = 64) -> int:
    """Send each gradient of more than `least` elements in two halves."""
    blocks = get_all_comm_blocks(gm, "all_reduce")
    large = [block for block in blocks if math.prod(block.shape) > least]
    for block in large:
        size = math.prod(block.shape)
        send_in_parts(gm, block, [size // 2, size - size // 2])
    return len(large)


@graphopt.graph_optimization_pass()
def first_layers_first(gm: fx.GraphModule) -> None:
    """Launch all-reduces after the backward, in the order of the parameters."""
    blocks = get_all_comm_blocks(gm, "all_reduce")
    place = {p.meta["fqn"]: i for i, p in enumerate(gradients_of(gm))}
    blocks.sort(key=lambda block: min(place[name] for name in parameters_of(gm, block)))
    first_reader = min(reader for block in blocks for reader in block.wait_nodes[0].users)
    move_before([block.comm_node for block in blocks], first_reader)
    move_before([block.wait_nodes[0] for block in blocks], first_reader)


SEEN: list[dict[str, Tensor]] = []


@graphopt.graph_optimization_pass(whole_step=True)
def log_norms(gm: fx.GraphModule) -> int:
    """Append the norms of all gradients to a list."""
    gradients = gradients_of(gm)
    last = max(gradients.values())
    norm = aten.linalg_vector_norm.default
    with gm.graph.inserting_before(last.next):
        norms = {p.meta["fqn"]: new(gm, g, norm, g) for p, g in gradients.items()}
        insert_callback(gm.graph, SEEN.append, norms)
    return len(norms)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As it is written in the model."""
    return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same."""
    return nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


@graphopt.graph_optimization_pass(changes_numerics=True)
def fuse_written_attention(gm: fx.GraphModule) -> int:
    """Put scaled_dot_product_attention in place of attention."""
    examples = {"q": 4, "k": 4, "v": 4}
    return graphopt.rewrite(gm, attention, fused, gradients=["q", "k", "v"], examples=examples)


@graphopt.graph_optimization_pass(repeatable=True)
def chunk_buckets(gm: fx.GraphModule, chunk: int = 256) -> int:
    """Send each bucket in chunks of `chunk` elements."""
    blocks = get_all_comm_blocks(gm, "all_reduce")
    large = [block for block in blocks if math.prod(block.shape) > chunk]
    for block in large:
        size = math.prod(block.shape)
        sizes = [chunk] * (size // chunk) + ([size % chunk] if size % chunk else [])
        send_in_parts(gm, block, sizes)
    return len(large)


@graphopt.graph_optimization_pass()
def update_late(gm: IterGraphModule, parameter: str = "out.weight") -> int:
    """Wait for the gradient of one parameter, and update it, in the next iteration."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        if parameter not in parameters_of(gm, block) or gm.graph.is_late(block.wait_nodes[0]):
            continue
        nodes = [*block.tail, *updates_of(gm, block)]
        if gm.graph.can_move_late(nodes) is None:
            gm.graph.move_to_next_iter_before(nodes)
            return 1
    return 0


class Block(nn.Module):
    """Attention, written out, and a layer."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = attention(q, k, v, q.shape[-1] ** -0.5)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(scale: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Block(16 * scale)
    x = torch.randn(2 * scale, 6 * scale, 16 * scale)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), x


PASSES = [
    (compress_bf16, {"idempotent": True}),
    (split_all_reduces, {"idempotent": False, "least": 512}),
    (first_layers_first, {}),
    (log_norms, {"idempotent": False}),
    (fuse_written_attention, {"changes": 1}),
    (chunk_buckets, {}),
    (update_late, {"changes": 1}),
]


def main() -> None:
    with fake_ranks(2):
        step = StepUnderTest(train_step, arguments())
        for pass_, options in PASSES:
            start = time.perf_counter()
            record = step.check(pass_, **options)
            print(f"{time.perf_counter() - start:5.2f} s  {record}")


if __name__ == "__main__":
    main()
