"""Graphs of steps with sharded parameters and tensor parallelism, of any size, on fake tensors.

Every layer of a transformer gathers its parameters from the group "fsdp" where it needs them, in
the forward and again in the backward, and scatters its gradients; with tensor parallelism each half
of a layer ends in an all-reduce over the group "tp", and so does its backward. Nothing is
scheduled: a wait stands right behind its launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphopt import _compat

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Sizes:
    """Of a model. `fsdp` and `tp` are numbers of ranks; 1: no such group."""

    layers: int = 2
    width: int = 64
    hidden: int = 128
    heads: int = 4
    tokens: int = 32
    fsdp: int = 4
    tp: int = 1


def gathered(shard: Tensor, sizes: Sizes) -> Tensor:
    """A whole parameter in bfloat16, from this rank's rows."""
    half = shard.to(torch.bfloat16)
    if sizes.fsdp == 1:
        return half
    return c10d.wait_tensor(c10d.all_gather_into_tensor(half, sizes.fsdp, "fsdp"))


def scattered(gradient: Tensor, sizes: Sizes) -> Tensor:
    """This rank's rows of a gradient, averaged."""
    if sizes.fsdp == 1:
        return gradient.float()
    full = gradient.float()
    launched = c10d.reduce_scatter_tensor(full, "avg", sizes.fsdp, "fsdp")
    return c10d.wait_tensor(launched)


def summed(value: Tensor, sizes: Sizes) -> Tensor:
    """Over the ranks of "tp"."""
    if sizes.tp == 1:
        return value
    return c10d.wait_tensor(c10d.all_reduce(value, "sum", "tp"))


class Linear(torch.autograd.Function):
    """A product with a sharded matrix, which is gathered again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.sizes = sizes
        return x @ gathered(shard, sizes).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, shard = ctx.saved_tensors
        weight = gathered(shard, ctx.sizes)
        dx = gradient @ weight
        return dx, scattered(gradient.t() @ x, ctx.sizes), None


class Enter(torch.autograd.Function):
    """Into the part of a layer that ranks of "tp" share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        ctx.sizes = sizes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return summed(gradient, ctx.sizes), None


class Leave(torch.autograd.Function):
    """Out of the part of a layer that ranks of "tp" share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        return summed(x, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def attention(x: Tensor, weights: list[Tensor], sizes: Sizes) -> Tensor:
    """Causal, written out, so that no fused kernel is needed."""
    q, k, v = (Linear.apply(x, weight, sizes) for weight in weights[:3])
    heads = [t.view(sizes.tokens, sizes.heads, -1).transpose(0, 1) for t in (q, k, v)]
    scores = torch.softmax(heads[0] @ heads[1].transpose(1, 2) / 8, -1, dtype=torch.float32)
    mixed = (scores.to(x.dtype) @ heads[2]).transpose(0, 1).reshape(sizes.tokens, -1)
    result: Tensor = Linear.apply(mixed, weights[3], sizes)
    return result


def normed(x: Tensor) -> Tensor:
    """Root mean square normalisation without a weight."""
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def layer(x: Tensor, weights: list[Tensor], sizes: Sizes) -> Tensor:
    """Attention and a gated unit, each added to what comes in."""
    mixed = attention(Enter.apply(normed(x), sizes), weights[:4], sizes)
    x = x + Leave.apply(mixed, sizes)
    y = Enter.apply(normed(x), sizes)
    gate, up = (Linear.apply(y, weight, sizes) for weight in weights[4:6])
    down = Linear.apply(torch.nn.functional.silu(gate) * up, weights[6], sizes)
    result: Tensor = x + Leave.apply(down, sizes)
    return result


def sharded_step(sizes: Sizes) -> fx.GraphModule:
    """Forward, backward and AdamW of one step, with fresh metadata on fake tensors."""
    width, inner = sizes.width, sizes.width // sizes.tp
    hidden = sizes.hidden // sizes.tp
    shapes = [(inner, width)] * 3 + [(width, inner)] + [(hidden, width)] * 2 + [(width, hidden)]
    with _compat.new_fake_mode():
        shards = [
            torch.empty(rows // sizes.fsdp, columns)
            for _ in range(sizes.layers)
            for rows, columns in shapes
        ]
        moments = [torch.empty_like(shard) for shard in shards for _ in range(2)]
        x = torch.empty(sizes.tokens, width, dtype=torch.bfloat16)
        return _compat.make_fx(_step(sizes))(*shards, *moments, x)


def _step(sizes: Sizes) -> Any:
    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        count = 7 * sizes.layers
        shards, moments, x = inputs[:count], inputs[count:-1], inputs[-1]
        leaves = [shard.detach().requires_grad_() for shard in shards]
        y = x
        for index in range(sizes.layers):
            y = layer(y, leaves[7 * index : 7 * index + 7], sizes)
        loss = y.float().pow(2).mean()
        gradients = torch.autograd.grad(loss, leaves)
        updated = [loss.detach()]
        for index, (shard, gradient) in enumerate(zip(shards, gradients, strict=True)):
            first, second = moments[2 * index : 2 * index + 2]
            updated += adamw(shard, gradient, first, second)
        return tuple(updated)

    return step


def adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    """New values of a parameter and its moments."""
    average = torch.lerp(first, gradient, 0.1)
    square = second * 0.999 + gradient * gradient * 0.001
    new = parameter * 0.999 - 1e-3 * average / (square.sqrt() + 1e-8)
    return [parameter.copy_(new), first.copy_(average), second.copy_(square)]
