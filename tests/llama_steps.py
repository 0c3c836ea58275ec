"""Training steps of Llama-3-8B as graphs on fake tensors: sharded, tensor parallel, or both.

As frameworks capture them: a wait stands right behind its launch, unless `Llama.ahead` says how
many gathers are launched before they are needed. Parameters are gathered for the forward and again
for the backward, each alone or a layer at once, and gradients are scattered alike. With tensor
parallelism tokens are sharded outside of attention and feed-forward (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from graphopt import _compat
from graphopt.graph_utils import is_collective, is_wait
from sharded import adamw

c10d = torch.ops._c10d_functional
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Llama:
    """A model and how it is trained; the defaults are those of Llama-3-8B.

    Attributes:
        tokens: of a step, on all ranks of a tensor-parallel group together.
        fsdp, tp: ranks of the groups "fsdp" and "tp"; 1: no such group.
        whole_layers: whether the parameters of a layer are gathered and scattered in one piece.
        ahead: how many gathers are launched before the one that is waited for; 0: none.
        recompute: whether the backward computes what is inside of layers again.
        updates: whether AdamW is part of the step.
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    tokens: int = 8192
    fsdp: int = 1
    tp: int = 1
    whole_layers: bool = False
    ahead: int = 0
    recompute: bool = False
    updates: bool = True

    @property
    def local(self) -> dict[str, tuple[int, int]]:
        """Shapes of the parameters of a layer, on one rank of "tp"."""
        tp, kv = self.tp, self.width * self.kv_heads // self.heads
        return {
            "norm": (self.width, 1),
            "q": (self.width // tp, self.width),
            "k": (kv // tp, self.width),
            "v": (kv // tp, self.width),
            "o": (self.width, self.width // tp),
            "norm_2": (self.width, 1),
            "gate": (self.hidden // tp, self.width),
            "up": (self.hidden // tp, self.width),
            "down": (self.width, self.hidden // tp),
        }

    @property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """Of all parameters: embedding, layers, head."""
        table = (self.vocabulary // self.tp, self.width)
        inside = [list(self.local.values()) for _ in range(self.layers)]
        return [[table], *inside, [(self.width, 1), table]]


def _gathered(shard: Tensor, ranks: int) -> Tensor:
    if ranks == 1:
        return shard
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, ranks, "fsdp"))


def _scattered(full: Tensor, ranks: int) -> Tensor:
    if ranks == 1:
        return full
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(full, "avg", ranks, "fsdp"))


def _over_tp(launch: Callable[[Tensor], Tensor], value: Tensor, ranks: int) -> Tensor:
    return value if ranks == 1 else c10d.wait_tensor(launch(value))


class Gather(torch.autograd.Function):
    """Whole parameters of one layer in bfloat16; the backward scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, model: Llama, *shards: Tensor) -> Any:
        ctx.model = model
        ctx.rows = [shard.shape for shard in shards]
        halves = [shard.to(BF16) for shard in shards]
        ranks = model.fsdp
        if not model.whole_layers or ranks == 1:
            return tuple(_gathered(half, ranks) for half in halves)
        flat = _gathered(torch.cat([half.reshape(-1) for half in halves]), ranks).view(ranks, -1)
        parts = torch.split_with_sizes_copy(flat, [half.numel() for half in halves], 1)
        return tuple(p.view(-1, s.shape[1]) for p, s in zip(parts, shards, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        ranks, full = ctx.model.fsdp, [gradient.float() for gradient in gradients]
        if not ctx.model.whole_layers or ranks == 1:
            return None, *(_scattered(gradient, ranks) for gradient in full)
        pieces = torch.cat([gradient.view(ranks, -1) for gradient in full], 1).reshape(-1)
        sizes = [rows.numel() for rows in ctx.rows]
        parts = torch.split(_scattered(pieces, ranks), sizes)
        return None, *(part.view(rows) for part, rows in zip(parts, ctx.rows, strict=True))


class Enter(torch.autograd.Function):
    """All tokens, of those that ranks of "tp" have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _over_tp(lambda t: c10d.all_gather_into_tensor(t, ranks, "tp"), x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        n = ctx.ranks
        return _over_tp(lambda t: c10d.reduce_scatter_tensor(t, "sum", n, "tp"), gradient, n), None


class Leave(torch.autograd.Function):
    """This rank's tokens, summed over the ranks of "tp"."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _over_tp(lambda t: c10d.reduce_scatter_tensor(t, "sum", ranks, "tp"), x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        n = ctx.ranks
        return _over_tp(lambda t: c10d.all_gather_into_tensor(t, n, "tp"), gradient, n), None


class Summed(torch.autograd.Function):
    """Of all ranks of "tp"; each keeps the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return _over_tp(lambda t: c10d.all_reduce(t, "sum", "tp"), x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Parameters:
    """Gathers the parameters of one layer; what the backward needs of them is gathered again."""

    def __init__(self, model: Llama, shards: Sequence[Tensor]) -> None:
        self._model, self._shards = model, shards
        self._again: tuple[Tensor, ...] | None = None
        self._of: dict[int, int] = {}

    def gathered(self) -> tuple[Tensor, ...]:
        whole: tuple[Tensor, ...] = Gather.apply(self._model, *self._shards)
        self._of = {t.untyped_storage()._cdata: i for i, t in enumerate(whole)}
        return whole

    def hooks(self) -> AbstractContextManager[None]:
        if self._model.recompute:  # which gathers again by itself
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, value: Tensor) -> Any:
        index = self._of.get(value.untyped_storage()._cdata)
        return value if index is None else (index, value.shape)

    def _unpack(self, held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        if self._again is None:
            with torch.no_grad():
                self._again = Gather.apply(self._model, *self._shards)
        index, shape = held
        again = self._again[index]
        return again if again.shape == shape else again.t()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    full = x.float()
    scaled = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled.to(BF16) * weight.view(-1)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(BF16)


def _attention(model: Llama, x: Tensor, angles: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
    size = model.width // model.heads
    q, k, v = (
        (x @ weight.t()).view(1, model.tokens, -1, size).transpose(1, 2) for weight in weights[:3]
    )
    q, k = (_rotated(value, *angles) for value in (q, k))
    shared = model.heads // model.kv_heads
    k, v = (value.repeat_interleave(shared, 1) for value in (k, v))
    mixed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return mixed.transpose(1, 2).reshape(model.tokens, -1) @ weights[3].t()


def _layer(model: Llama, x: Tensor, angles: Sequence[Tensor], *shards: Tensor) -> Tensor:
    held = Parameters(model, shards)
    norm, q, k, v, o, norm_2, gate, up, down = held.gathered()
    with held.hooks():
        y = Enter.apply(_normed(x, norm), model.tp)
        x = x + Leave.apply(_attention(model, y, angles, (q, k, v, o)), model.tp)
        y = Enter.apply(_normed(x, norm_2), model.tp)
        inner = torch.nn.functional.silu(y @ gate.t()) * (y @ up.t())
        result: Tensor = x + Leave.apply(inner @ down.t(), model.tp)
    return result


def _loss(model: Llama, x: Tensor, target: Tensor, *shards: Tensor) -> Tensor:
    held = Parameters(model, shards)
    norm, head = held.gathered()
    with held.hooks():
        logits = (Enter.apply(_normed(x, norm), model.tp) @ head.t()).float()
        highest = logits.detach().amax(-1, keepdim=True)
        total = Summed.apply((logits - highest).exp().sum(-1), model.tp)
        mine = Summed.apply(logits.gather(1, target.view(-1, 1)).view(-1), model.tp)
        return (total.log() + highest.view(-1) - mine).mean()


def _embedded(model: Llama, tokens: Tensor, shard: Tensor) -> Tensor:
    (table,) = Parameters(model, (shard,)).gathered()
    return Leave.apply(torch.nn.functional.embedding(tokens, table), model.tp)  # type: ignore[no-any-return]


def llama_step(model: Llama) -> fx.GraphModule:
    """Forward, backward and update of one step, with fresh metadata on fake tensors."""
    layers = model.shapes
    size = model.width // model.heads // 2
    with _compat.new_fake_mode():
        shards = [
            torch.empty(rows // model.fsdp, columns) for layer in layers for rows, columns in layer
        ]
        moments = [torch.empty_like(s) for s in shards for _ in range(2 * model.updates)]
        angles = [torch.empty(model.tokens, size) for _ in range(2)]
        batch = [torch.zeros(model.tokens, dtype=torch.int64) for _ in range(2)]
        traced = _compat.make_fx(partial(_step, model))(*shards, *moments, *angles, *batch)
    traced.graph.eliminate_dead_code()
    return _ahead(traced, model.ahead) if model.ahead else traced


def _step(model: Llama, *inputs: Tensor) -> tuple[Tensor, ...]:
    sizes = [len(layer) for layer in model.shapes]
    count = sum(sizes)
    shards, rest = inputs[:count], list(inputs[count:])
    *moments, cosine, sine, tokens, target = rest
    leaves = [shard.detach().requires_grad_() for shard in shards]
    of_layer = _cut(leaves, sizes)
    x = _embedded(model, tokens, *of_layer[0])
    for parameters in of_layer[1:-1]:
        inside = partial(_layer, model)
        if model.recompute:
            x = checkpoint(
                inside,
                x,
                (cosine, sine),
                *parameters,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            x = inside(x, (cosine, sine), *parameters)
    loss = _loss(model, x, target, *of_layer[-1])
    gradients = torch.autograd.grad(loss, leaves)
    if not model.updates:
        return loss.detach(), *gradients
    updated = [loss.detach()]
    for index, (shard, gradient) in enumerate(zip(shards, gradients, strict=True)):
        updated += adamw(shard, gradient, *moments[2 * index : 2 * index + 2])
    return tuple(updated)


def _cut(values: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    iterator = iter(values)
    return [[next(iterator) for _ in range(size)] for size in sizes]


def _needed(launch: fx.Node) -> list[fx.Node]:
    """A gather and what it needs beside inputs, in an order that runs."""
    found: dict[fx.Node, None] = {launch: None}
    pending = [launch]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source.op != "placeholder":
                found.pop(source, None)
                found[source] = None
                pending.append(source)
    return list(found)[::-1]


def _ahead(gm: fx.GraphModule, ahead: int) -> fx.GraphModule:
    """Launch gathers of parameters so many gathers early, and wait for scatters where they are
    read."""
    launches = [node for node in gm.graph.nodes if is_collective(node) and node.args[-1] == "fsdp"]
    gathers = [n for n in launches if "gather" in str(n.target)]
    for launch, before in zip(gathers[ahead:], gathers, strict=False):
        for node in [node for node in _needed(launch) if before < node]:
            before.prepend(node)
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    for wait in [n for n in gm.graph.nodes if is_wait(n)]:
        if wait.all_input_nodes[0] in launches and "scatter" in str(wait.all_input_nodes[0].target):
            min(wait.users, key=position.__getitem__).prepend(wait)
    gm.graph.lint()
    return gm
