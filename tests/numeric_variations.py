"""Passes that change numerics, on five models: honest ones, and ones with a mistake in one term.

A variation is a function of a graph that makes it and returns whether the graph has such a term.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from graphopt.comm import get_all_comm_blocks, replace_collective
from graphopt.graph_utils import (
    call_function_with_meta,
    find_nodes,
    get_outputs,
    is_operator,
    set_outputs,
)
from graphopt.ir.metadata import input_kind

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Variation = Callable[[fx.GraphModule], bool]
Case = tuple[Callable[..., Any], tuple[Any, ...]]

FACTOR = 1.002


# ---- models


class Attention(nn.Module):
    """A token embedding, one attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(23, 12), nn.LayerNorm(12)
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 23)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.tokens(x))).chunk(3, -1)
        return self.head(torch.softmax(q @ k.transpose(-2, -1) / 3, -1) @ v)


class Recurrent(nn.Module):
    """A cell that runs over a few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 7)
        for position in x.unbind(1):
            state = self.cell(position, state)
        return self.head(state)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def averaged_step(
    model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> Tensor:
    loss = step(model, optimizer, x, y)
    with torch.no_grad():
        for own, other in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 0.1)
    return loss


def perceptron() -> Case:
    model = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return step, (model, optimizer, torch.randn(8, 9), torch.randint(0, 4, (8,)))


def convolution() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3)
    )
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    return step, (model, optimizer, torch.randn(6, 2, 6, 6), torch.randint(0, 3, (6,)))


def attention() -> Case:
    model = Attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, weight_decay=0.01)
    return clipped_step, (
        model,
        optimizer,
        torch.randint(0, 23, (3, 6)),
        torch.randint(0, 23, (3, 6)),
    )


def recurrent() -> Case:
    model = Recurrent()
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3, weight_decay=0.05)
    return step, (model, optimizer, torch.randn(5, 3, 5), torch.randint(0, 3, (5,)))


def with_average() -> Case:
    model, average = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01)
    return averaged_step, (
        model,
        average.requires_grad_(False),
        optimizer,
        torch.randn(7, 6),
        torch.randint(0, 5, (7,)),
    )


MODELS = {
    made.__name__: made for made in (perceptron, convolution, attention, recurrent, with_average)
}


# ---- wrong


def new(gm: fx.GraphModule, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return call_function_with_meta(gm.graph, target, args, kwargs)


def behind(gm: fx.GraphModule, node: fx.Node, make: Callable[[], fx.Node]) -> None:
    """Let readers of a node read what is made of it."""
    known = set(gm.graph.nodes)
    with gm.graph.inserting_before(node.next):
        made = make()
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user in known)


def state_updates(gm: fx.GraphModule, kind: str, name: str = "") -> list[fx.Node]:
    """The `copy_` of all state of one kind that has more than one element."""
    updates = [n for n in get_outputs(gm.graph).updates if isinstance(n, fx.Node)]
    return [
        node
        for node in updates
        if input_kind(node.args[0]) == kind
        and name in node.args[0].name
        and node.args[0].meta["val"].numel() > 1
    ]


def number(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    """The hyperparameters of that name, as numbers."""
    return find_nodes(
        gm.graph,
        lambda n: (
            is_operator(n.target, "aten::_local_scalar_dense")
            and n.args[0].name.endswith(name)
            and input_kind(n.args[0]) == "hyperparameter"
        ),
    )


def scaled_number(gm: fx.GraphModule, name: str, factor: float) -> bool:
    found = number(gm, name)
    for node in found:
        behind(gm, node, lambda n=node: new(gm, operator.mul, n, factor))
    return bool(found)


def update(gm: fx.GraphModule, factor: float, most: int | None = None) -> bool:
    """Parameters go `factor` times as far."""
    for node in state_updates(gm, "parameter")[:most]:
        old, value = node.args[:2]
        with gm.graph.inserting_before(node):
            gone = new(gm, aten.sub.Tensor, value, old)
            node.update_arg(1, new(gm, aten.add.Tensor, old, gone, alpha=factor))
    return True


def gradients(gm: fx.GraphModule, factor: float, most: int | None = None) -> bool:
    """What is averaged over ranks is multiplied. Where it is divided by its norm, nothing is wrong
    with a factor."""
    if most is None and find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::clamp")):
        return False
    for block in get_all_comm_blocks(gm, "all_reduce")[:most]:
        (wait,) = block.wait_nodes
        behind(gm, wait, lambda w=wait: new(gm, aten.mul.Tensor, w, factor))
    return True


def state(gm: fx.GraphModule, name: str, factor: float) -> bool:
    """State of one name is multiplied before it is kept."""
    found = state_updates(gm, "optimizer_state", name)
    for node in found:
        with gm.graph.inserting_before(node):
            node.update_arg(1, new(gm, aten.mul.Tensor, node.args[1], factor))
    return bool(found)


def weights(gm: fx.GraphModule, factor: float) -> bool:
    """Parameters are multiplied in each step."""
    for node in state_updates(gm, "parameter"):
        with gm.graph.inserting_before(node):
            node.update_arg(1, new(gm, aten.mul.Tensor, node.args[1], factor))
    return True


def rounded(gm: fx.GraphModule, node: fx.Node, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    few = new(gm, aten._to_copy.default, node, dtype=dtype)
    return new(gm, aten._to_copy.default, few, dtype=torch.float32)


def kept_in_bf16(gm: fx.GraphModule, kind: str, name: str = "") -> bool:
    found = state_updates(gm, kind, name)
    for node in found:
        with gm.graph.inserting_before(node):
            node.update_arg(1, rounded(gm, node.args[1]))
    return bool(found)


def read_in_bf16(gm: fx.GraphModule, kind: str, name: str = "") -> bool:
    """The optimizer reads what it has kept in bfloat16."""
    found = state_updates(gm, kind, name)
    for node in found:
        held = node.args[0]
        readers = [u for u in held.users if u.meta["phase"] == "optimizer" and u is not node]
        if not readers:
            return False
        with gm.graph.inserting_before(min(readers)):
            few = rounded(gm, held)
        for reader in readers:
            reader.replace_input_with(held, few)
    return bool(found)


def without_bias_correction(gm: fx.GraphModule) -> bool:
    found = find_nodes(gm.graph, lambda n: n.target is operator.pow and not is_half(n.args[1]))
    for node in found:
        node.replace_all_uses_with(0.0)  # type: ignore[arg-type]
    return bool(found)


def is_half(value: Any) -> bool:
    return isinstance(value, float) and value == 0.5


def without_eps(gm: fx.GraphModule) -> bool:
    small = [
        n
        for n in gm.graph.nodes
        if is_operator(n.target, "aten::add")
        and isinstance(n.args[1], float)
        and 0 < n.args[1] < 1e-7
    ]
    for node in small:
        node.update_arg(1, 0.0)
    return bool(small)


def without_one_gradient(gm: fx.GraphModule) -> bool:
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    (wait,) = block.wait_nodes
    behind(gm, wait, lambda: new(gm, aten.mul.Tensor, wait, 0.0))
    return True


def without_half_of_a_gradient(gm: fx.GraphModule) -> bool:
    block = max(get_all_comm_blocks(gm, "all_reduce"), key=lambda b: torch.Size(b.shape).numel())
    (wait,) = block.wait_nodes
    rows = wait.meta["val"].shape[0] // 2

    def made() -> fx.Node:
        first = new(gm, aten.slice.Tensor, wait, 0, 0, rows)
        rest = new(gm, aten.slice.Tensor, wait, 0, rows, 1 << 40)
        return new(gm, aten.cat.default, [new(gm, aten.mul.Tensor, first, 0.0), rest])

    behind(gm, wait, made)
    return True


def without_norm(gm: fx.GraphModule) -> bool:
    found = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::clamp"))
    for node in found:
        behind(gm, node, lambda n=node: new(gm, aten.full_like.default, n, 1.0))
    return bool(found)


def norm(gm: fx.GraphModule, factor: float) -> bool:
    found = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::clamp"))
    for node in found:
        behind(gm, node, lambda n=node: new(gm, aten.mul.Tensor, n, factor))
    return bool(found)


def without_update(gm: fx.GraphModule) -> bool:
    node = state_updates(gm, "parameter")[-1]
    with gm.graph.inserting_before(node):
        node.update_arg(1, new(gm, aten.clone.default, node.args[0]))
    return True


def average_of_weights(gm: fx.GraphModule, factor: float) -> bool:
    found = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::lerp") and n.args[2] == 0.1)
    for node in found:
        node.update_arg(2, 0.1 * factor)
    return bool(found)


def batch_statistics(gm: fx.GraphModule, factor: float) -> bool:
    found = state_updates(gm, "buffer")
    for node in found:
        with gm.graph.inserting_before(node):
            node.update_arg(1, new(gm, aten.mul.Tensor, node.args[1], factor))
    return bool(found)


WRONG: dict[str, Variation] = {
    "update by 1.002": partial(update, factor=FACTOR),
    "update by 0.998": partial(update, factor=1 / FACTOR),
    "update of one parameter by 1.002": partial(update, factor=FACTOR, most=1),
    "decay by 1.002": partial(scaled_number, name="weight_decay", factor=FACTOR),
    "decay with the other sign": partial(scaled_number, name="weight_decay", factor=-1),
    "decay twice": partial(scaled_number, name="weight_decay", factor=2),
    "decay left out": partial(scaled_number, name="weight_decay", factor=0),
    "momentum by 1.002": partial(scaled_number, name="momentum", factor=FACTOR),
    "first beta by 1.002": partial(scaled_number, name="betas_0", factor=FACTOR),
    "second beta by 0.998": partial(scaled_number, name="betas_1", factor=1 / FACTOR),
    "momentum left out": partial(scaled_number, name="momentum", factor=0),
    "average by 1.002": partial(gradients, factor=FACTOR),
    "average by 0.998": partial(gradients, factor=1 / FACTOR),
    "average of one gradient by 1.002": partial(gradients, factor=FACTOR, most=1),
    "weights by 1.003": partial(weights, factor=1.003),
    "weights by 1.0001": partial(weights, factor=1.0001),
    "exp_avg by 1.002": partial(state, name="exp_avg", factor=FACTOR),
    "momentum_buffer by 1.002": partial(state, name="momentum_buffer", factor=FACTOR),
    "square_avg by 1.002": partial(state, name="square_avg", factor=FACTOR),
    "norm by 1.002": partial(norm, factor=FACTOR),
    "norm left out": without_norm,
    "bias correction left out": without_bias_correction,
    "eps left out": without_eps,
    "one gradient left out": without_one_gradient,
    "half of a gradient left out": without_half_of_a_gradient,
    "one update left out": without_update,
    "parameters kept in bf16": partial(kept_in_bf16, kind="parameter"),
    "parameters read in bf16": partial(read_in_bf16, kind="parameter"),
    "exp_avg kept in bf16": partial(kept_in_bf16, kind="optimizer_state", name="exp_avg"),
    "exp_avg read in bf16": partial(read_in_bf16, kind="optimizer_state", name="exp_avg"),
    "squares read in bf16": partial(read_in_bf16, kind="optimizer_state", name="_sq"),
    "momentum_buffer kept in bf16": partial(
        kept_in_bf16, kind="optimizer_state", name="momentum_buffer"
    ),
    "momentum_buffer read in bf16": partial(
        read_in_bf16, kind="optimizer_state", name="momentum_buffer"
    ),
    "average of weights by 1.002": partial(average_of_weights, factor=FACTOR),
    "statistics of the batch by 1.002": partial(batch_statistics, factor=FACTOR),
}


# ---- honest


def sent_as(gm: fx.GraphModule, dtype: torch.dtype) -> bool:
    """Gradients travel in another dtype."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        with gm.graph.inserting_before(block.wait_nodes[0]):
            half = new(gm, aten._to_copy.default, block.inputs[0], dtype=dtype)
            launch = new(gm, c10d.all_reduce.default, half, *block.comm_node.args[1:])
            wait = new(gm, c10d.wait_tensor.default, launch)
            whole = new(gm, aten._to_copy.default, wait, dtype=torch.float32)
            replace_collective(gm, block, whole)
    return True


def rounded_to(gm: fx.GraphModule, dtype: torch.dtype) -> bool:
    """Gradients are rounded to eight bits, each tensor with a scale of its own."""
    largest = torch.finfo(dtype).max
    for block in get_all_comm_blocks(gm, "all_reduce"):
        sent = block.inputs[0]
        with gm.graph.inserting_before(block.comm_node):
            size = new(gm, aten.amax.default, new(gm, aten.abs.default, sent))
            scale = new(gm, aten.div.Tensor, new(gm, aten.add.Tensor, size, 1e-30), largest)
            few = new(gm, aten._to_copy.default, new(gm, aten.div.Tensor, sent, scale), dtype=dtype)
            wide = new(gm, aten._to_copy.default, few, dtype=torch.float32)
            near = new(gm, aten.mul.Tensor, wide, scale)
        block.comm_node.replace_input_with(sent, near)
    return True


def scaled_after(gm: fx.GraphModule) -> bool:
    """Gradients are divided by the number of ranks after they were added up."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        sent, (wait,) = block.inputs[0], block.wait_nodes
        factor = sent.args[1]
        if not is_operator(sent.target, "aten::mul"):
            continue
        block.comm_node.replace_input_with(sent, sent.args[0])
        behind(gm, wait, lambda w=wait, f=factor: new(gm, aten.mul.Tensor, w, f))
    return True


def update_apart(gm: fx.GraphModule) -> bool:
    """Parameters are updated by what they go, which is computed first."""
    return update(gm, 1.0)


def decay_folded_out(gm: fx.GraphModule) -> bool:
    """`p * (1 - lr * wd)` as `p - p * (lr * wd)`, and `g + wd * p` as `g - (-wd) * p`."""
    found = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.meta.get("phase") != "optimizer":
            continue
        held = node.args[0] if node.args else None
        if (
            is_operator(node.target, "aten::mul")
            and isinstance(held, fx.Node)
            and input_kind(held) == "parameter"
        ):
            factor = node.args[1]
            with gm.graph.inserting_before(node):
                part = new(gm, operator.sub, 1, factor)
                gone = new(gm, aten.mul.Tensor, held, part)
                node.replace_all_uses_with(new(gm, aten.sub.Tensor, held, gone))
            found = True
        alpha = node.kwargs.get("alpha")
        if isinstance(alpha, fx.Node) and alpha in number(gm, "weight_decay"):
            with gm.graph.inserting_before(node):
                gone = new(gm, aten.mul.Tensor, node.args[1], alpha)
                node.replace_all_uses_with(new(gm, aten.add.Tensor, node.args[0], gone))
            found = True
    return found


def one_norm(gm: fx.GraphModule) -> bool:
    """The norm of all gradients in one row, in place of the norm of their norms."""
    stacks = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::stack"))
    norms: Sequence[Any] = stacks[0].args[0] if stacks else ()
    if not norms or not all(is_operator(n.target, "aten::linalg_vector_norm") for n in norms):
        return False
    (total,) = stacks[0].users
    with gm.graph.inserting_before(total):
        rows = [new(gm, aten.reshape.default, n.args[0], [-1]) for n in norms]
        row = new(gm, aten.cat.default, rows)
        total.replace_all_uses_with(new(gm, aten.linalg_vector_norm.default, row))
    return True


def norm_of_squares(gm: fx.GraphModule) -> bool:
    """The norm as the root of a sum of squares."""
    stacks = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::stack"))
    if not stacks:
        return False
    (total,) = stacks[0].users
    with gm.graph.inserting_before(total):
        squares = new(gm, aten.mul.Tensor, stacks[0], stacks[0])
        total.replace_all_uses_with(new(gm, aten.sqrt.default, new(gm, aten.sum.default, squares)))
    return True


HONEST: dict[str, Variation] = {
    "sent as bf16": partial(sent_as, dtype=torch.bfloat16),
    "sent as f16": partial(sent_as, dtype=torch.float16),
    "rounded to e4m3": partial(rounded_to, dtype=torch.float8_e4m3fn),
    "rounded to e5m2": partial(rounded_to, dtype=torch.float8_e5m2),
    "divided after the sum": scaled_after,
    "update apart": update_apart,
    "decay folded out": decay_folded_out,
    "one norm over all gradients": one_norm,
    "norm of squares": norm_of_squares,
}


# ---- further models


class Blocks(nn.Module):
    """Two residual blocks, whose embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for norm, inner in zip(self.norms, self.inner, strict=True):
            hidden = hidden + inner(norm(hidden))
        return F.linear(hidden, self.tokens.weight)


def tied() -> Case:
    model = Blocks()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02, weight_decay=0.01)
    return clipped_step, (
        model,
        optimizer,
        torch.randint(0, 17, (4, 5)),
        torch.randint(0, 17, (4, 5)),
    )


def plain() -> Case:
    model = nn.Sequential(
        nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 14), nn.ELU(), nn.Linear(14, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return clipped_step, (model, optimizer, torch.randn(9, 7), torch.randint(0, 3, (9,)))


def adaptive() -> Case:
    model = nn.Sequential(nn.Linear(6, 18), nn.Softplus(), nn.Linear(18, 5))
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3, weight_decay=0.02)
    return averaged_step, (
        model,
        nn.Sequential(nn.Linear(6, 18), nn.Softplus(), nn.Linear(18, 5)).requires_grad_(False),
        optimizer,
        torch.randn(8, 6),
        torch.randint(0, 5, (8,)),
    )


FURTHER_MODELS = {made.__name__: made for made in (tied, plain, adaptive)}


# ---- further mistakes


def reduced(gm: fx.GraphModule) -> list[fx.Node]:
    """The waits for averages of gradients."""
    return [block.wait_nodes[0] for block in get_all_comm_blocks(gm, "all_reduce")]


def each_average(gm: fx.GraphModule, make: Callable[[fx.Node], fx.Node], most: int | None) -> bool:
    waits = reduced(gm)[:most]
    for wait in waits:
        behind(gm, wait, lambda w=wait: make(w))
    return bool(waits)


def average_becomes(
    make: Callable[[fx.GraphModule, fx.Node], fx.Node], most: int | None = None
) -> Variation:
    """The mistake that an average is replaced by something made of it."""

    def vary(gm: fx.GraphModule) -> bool:
        return each_average(gm, lambda wait: make(gm, wait), most)

    return vary


def own_gradient(gm: fx.GraphModule) -> bool:
    """Each rank goes by its own gradient of one parameter."""
    block = get_all_comm_blocks(gm, "all_reduce")[0]
    (wait,) = block.wait_nodes
    behind(gm, wait, lambda: new(gm, aten.mul.Tensor, block.inputs[0], 2.0))
    return True


def largest_only(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """Elements below a tenth of the largest are left out."""
    size = new(gm, aten.abs.default, wait)
    least = new(gm, aten.mul.Tensor, new(gm, aten.amax.default, size), 0.1)
    kept = new(gm, aten.ge.Tensor, size, least)
    return new(gm, aten.mul.Tensor, wait, kept)


def signs(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """The mean size, with the sign of each element."""
    size = new(gm, aten.mean.default, new(gm, aten.abs.default, wait))
    return new(gm, aten.mul.Tensor, new(gm, aten.sign.default, wait), size)


def rolled(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    return new(gm, aten.roll.default, wait, [1], [0])


def reversed_rows(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    return new(gm, aten.flip.default, wait, [0])


def clamped(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """No element above half of the largest."""
    most = new(
        gm, aten.mul.Tensor, new(gm, aten.amax.default, new(gm, aten.abs.default, wait)), 0.5
    )
    low = new(gm, aten.neg.default, most)
    return new(gm, aten.minimum.default, new(gm, aten.maximum.default, wait, low), most)


def shifted(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """A part of the mean size is added to each element."""
    size = new(gm, aten.mean.default, new(gm, aten.abs.default, wait))
    return new(gm, aten.add.Tensor, wait, new(gm, aten.mul.Tensor, size, 0.05))


def truncated(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """Seven bits below the largest, always towards zero."""
    size = new(gm, aten.amax.default, new(gm, aten.abs.default, wait))
    unit = new(gm, aten.mul.Tensor, new(gm, aten.add.Tensor, size, 1e-30), 2.0**-7)
    whole = new(gm, aten.trunc.default, new(gm, aten.div.Tensor, wait, unit))
    return new(gm, aten.mul.Tensor, whole, unit)


def last_row_twice(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    """The last row stands in the place of the first as well."""
    rest = new(gm, aten.slice.Tensor, wait, 0, 1, 1 << 40)
    last = new(gm, aten.slice.Tensor, wait, 0, -1, 1 << 40)
    return new(gm, aten.cat.default, [last, rest])


def tripled_once(gm: fx.GraphModule, wait: fx.Node) -> fx.Node:
    return new(gm, aten.add.Tensor, wait, new(gm, aten.mul.Tensor, wait, 2.0))


def with_weights(gm: fx.GraphModule, factor: float) -> bool:
    """A decay that nobody asked for, in the gradient."""
    for node in state_updates(gm, "parameter"):
        with gm.graph.inserting_before(node):
            part = new(gm, aten.mul.Tensor, node.args[0], factor)
            node.update_arg(1, new(gm, aten.sub.Tensor, node.args[1], part))
    return True


def exchanged_updates(gm: fx.GraphModule) -> bool:
    """Two parameters of one shape get each other's update."""
    updates = state_updates(gm, "parameter")
    for first in updates:
        for second in updates:
            values = [node.args[1].meta["val"].shape for node in (first, second)]
            if first < second and values[0] == values[1]:
                a, b = first.args[1], second.args[1]
                if a < first and b < first:
                    first.update_arg(1, b)
                    second.update_arg(1, a)
                    return True
    return False


def stale_state(gm: fx.GraphModule, name: str) -> bool:
    """State of one name is never updated."""
    found = state_updates(gm, "optimizer_state", name)
    for node in found:
        with gm.graph.inserting_before(node):
            node.update_arg(1, new(gm, aten.clone.default, node.args[0]))
    return bool(found)


def state_forgotten(gm: fx.GraphModule, name: str) -> bool:
    """The optimizer reads zeros in place of what it has kept."""
    found = state_updates(gm, "optimizer_state", name)
    for node in found:
        held = node.args[0]
        readers = [u for u in held.users if u.meta["phase"] == "optimizer" and u is not node]
        if not readers:
            return False
        with gm.graph.inserting_before(min(readers)):
            zeros = new(gm, aten.zeros_like.default, held)
        for reader in readers:
            reader.replace_input_with(held, zeros)
    return bool(found)


def loss_by(gm: fx.GraphModule, factor: float) -> bool:
    """What is returned is not the loss that was computed."""
    outputs = get_outputs(gm.graph)
    loss = outputs.results[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        other = new(gm, aten.mul.Tensor, loss, factor)
    set_outputs(gm.graph, outputs._replace(results=[other, *outputs.results[1:]]))
    return True


def steps_by(gm: fx.GraphModule, more: float) -> bool:
    """The bias correction counts one step more."""
    found = find_nodes(gm.graph, lambda n: n.target is operator.pow and not is_half(n.args[1]))
    for node in found:
        with gm.graph.inserting_before(node):
            node.update_arg(1, new(gm, operator.add, node.args[1], more))
    return bool(found)


def eps_by(gm: fx.GraphModule, factor: float) -> bool:
    small = [
        n
        for n in gm.graph.nodes
        if is_operator(n.target, "aten::add") and isinstance(n.args[1], float) and n.args[1] < 1e-4
    ]
    for node in small:
        node.update_arg(1, node.args[1] * factor)
    return bool(small) and not find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::clamp"))


def first_only(gm: fx.GraphModule, kind: str, factor: float) -> bool:
    """One element of each tensor is wrong."""
    for node in state_updates(gm, kind):
        with gm.graph.inserting_before(node):
            gone = new(gm, aten.sub.Tensor, node.args[1], node.args[0])
            flat = new(gm, aten.reshape.default, gone, [-1])
            first = new(gm, aten.mul.Tensor, new(gm, aten.slice.Tensor, flat, 0, 0, 1), factor)
            rest = new(gm, aten.slice.Tensor, flat, 0, 1, 1 << 40)
            row = new(gm, aten.cat.default, [first, rest])
            shaped = new(gm, aten.view.default, row, list(gone.meta["val"].shape))
            node.update_arg(1, new(gm, aten.add.Tensor, node.args[0], shaped))
    return True


def rounded_and(dtype: torch.dtype, mistake: Variation) -> Variation:
    """A mistake behind gradients that were rounded, by more than it changes anything."""

    def vary(gm: fx.GraphModule) -> bool:
        return mistake(gm) and rounded_to(gm, dtype)

    return vary


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

FURTHER_WRONG: dict[str, Variation] = {
    "update by 1.0025": partial(update, factor=1.0025),
    "update by -1": partial(update, factor=-1.0),
    "update twice": partial(update, factor=2.0),
    "update of two parameters by 0.997": partial(update, factor=0.997, most=2),
    "first element of each update left out": partial(first_only, kind="parameter", factor=0.0),
    "first element of each update twice": partial(first_only, kind="parameter", factor=2.0),
    "own gradient on each rank": own_gradient,
    "sum in place of the average": partial(gradients, factor=2.0),
    "average of an average": partial(gradients, factor=0.5),
    "averages by 1.003": partial(gradients, factor=1.003),
    "average with the other sign": average_becomes(
        lambda gm, w: new(gm, aten.neg.default, w), most=1
    ),
    "largest elements alone": average_becomes(largest_only),
    "signs alone": average_becomes(signs),
    "rows moved by one": average_becomes(rolled, most=1),
    "rows in the other order": average_becomes(reversed_rows, most=1),
    "elements clamped": average_becomes(clamped),
    "a part of the mean added": average_becomes(shifted),
    "always rounded towards zero": average_becomes(truncated),
    "last row in place of the first": average_becomes(last_row_twice),
    "one gradient three times": average_becomes(tripled_once, most=1),
    "squares in place of sizes": average_becomes(lambda gm, w: new(gm, aten.mul.Tensor, w, w)),
    "sizes without signs": average_becomes(lambda gm, w: new(gm, aten.abs.default, w)),
    "a decay that nobody asked for": partial(with_weights, factor=1e-4),
    "updates exchanged": exchanged_updates,
    "exp_avg never updated": partial(stale_state, name="exp_avg"),
    "squares never updated": partial(stale_state, name="_sq"),
    "sum never updated": partial(stale_state, name="sum"),
    "momentum_buffer never updated": partial(stale_state, name="momentum_buffer"),
    "exp_avg forgotten": partial(state_forgotten, name="exp_avg"),
    "momentum_buffer forgotten": partial(state_forgotten, name="momentum_buffer"),
    "exp_inf by 1.002": partial(state, name="exp_inf", factor=FACTOR),
    "sum by 1.002": partial(state, name="sum", factor=FACTOR),
    "loss by 1.002": partial(loss_by, factor=FACTOR),
    "loss without its average": partial(loss_by, factor=8.0),
    "bias correction of the next step": partial(steps_by, more=1.0),
    "eps ten thousand times": partial(eps_by, factor=1e4),
    "average of weights by 0.99": partial(average_of_weights, factor=0.99),
    "average of weights by 0": partial(average_of_weights, factor=0.0),
    "norm twice": partial(norm, factor=0.5),
    "lr by 1.002": partial(scaled_number, name="lr", factor=FACTOR),
    "lr by 0.997": partial(scaled_number, name="lr", factor=0.997),
    "second beta left out": partial(scaled_number, name="betas_1", factor=0.0),
    "first beta by 0.99": partial(scaled_number, name="betas_0", factor=0.99),
    "decay by 0.99": partial(scaled_number, name="weight_decay", factor=0.99),
    "e4m3, update by 1.002": rounded_and(E4M3, partial(update, factor=FACTOR)),
    "e5m2, update of one parameter by 1.002": rounded_and(
        E5M2, partial(update, factor=FACTOR, most=1)
    ),
    "e4m3, decay by 1.002": rounded_and(
        E4M3, partial(scaled_number, name="weight_decay", factor=FACTOR)
    ),
    "e4m3, exp_avg by 1.002": rounded_and(E4M3, partial(state, name="exp_avg", factor=FACTOR)),
    "e5m2, momentum by 1.002": rounded_and(
        E5M2, partial(scaled_number, name="momentum", factor=FACTOR)
    ),
    "e4m3, exp_avg read in bf16": rounded_and(
        E4M3, partial(read_in_bf16, kind="optimizer_state", name="exp_avg")
    ),
    "e5m2, norm by 1.002": rounded_and(E5M2, partial(norm, factor=FACTOR)),
    "e4m3, lr by 1.002": rounded_and(E4M3, partial(scaled_number, name="lr", factor=FACTOR)),
}


def rounded_average(gm: fx.GraphModule, bits: int) -> bool:
    """Averages are rounded to the nearest of so many steps, with a scale for each tensor."""

    def near(wait: fx.Node) -> fx.Node:
        size = new(gm, aten.amax.default, new(gm, aten.abs.default, wait))
        unit = new(gm, aten.mul.Tensor, new(gm, aten.add.Tensor, size, 1e-30), 2.0**-bits)
        whole = new(gm, aten.round.default, new(gm, aten.div.Tensor, wait, unit))
        return new(gm, aten.mul.Tensor, whole, unit)

    return each_average(gm, near, None)


def scaled_while_sent(gm: fx.GraphModule) -> bool:
    """Gradients are 1024 times as large while they travel in half precision."""
    for block in get_all_comm_blocks(gm, "all_reduce"):
        sent, (wait,) = block.inputs[0], block.wait_nodes
        with gm.graph.inserting_before(block.comm_node):
            few = rounded(gm, new(gm, aten.mul.Tensor, sent, 1024.0), torch.float16)
        block.comm_node.replace_input_with(sent, few)
        behind(gm, wait, lambda w=wait: new(gm, aten.div.Tensor, w, 1024.0))
    return True


def products_in_bf16(gm: fx.GraphModule) -> bool:
    """Matrix products read bfloat16, forward and backward."""
    found = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::mm"))
    for node in found:
        for read in dict.fromkeys(node.args):
            with gm.graph.inserting_before(node):
                node.replace_input_with(read, rounded(gm, read))
    return bool(found)


def other_order(gm: fx.GraphModule) -> bool:
    """Sums over examples, for the gradients of biases, in another order."""
    found = find_nodes(gm.graph, lambda n: is_operator(n.target, "aten::sum") and len(n.args) > 1)
    for node in found:
        (dim,) = node.args[1] if len(node.args[1]) == 1 else (None,)
        if dim is None:
            return False
        with gm.graph.inserting_before(node):
            turned = new(gm, aten.flip.default, node.args[0], [dim])
            node.update_arg(0, turned)
    return bool(found)


def decay_before(gm: fx.GraphModule) -> bool:
    """What parameters go is added in two parts."""
    for node in state_updates(gm, "parameter"):
        old, value = node.args[:2]
        with gm.graph.inserting_before(node):
            gone = new(gm, aten.mul.Tensor, new(gm, aten.sub.Tensor, value, old), 0.5)
            once = new(gm, aten.add.Tensor, old, gone)
            node.update_arg(1, new(gm, aten.add.Tensor, once, gone))
    return True


FURTHER_HONEST: dict[str, Variation] = {
    "rounded to 2^-11 of the largest": partial(rounded_average, bits=11),
    "rounded to 2^-8 of the largest": partial(rounded_average, bits=8),
    "sums in another order": other_order,
    "1024 times as large while sent": scaled_while_sent,
    "matrix products in bf16": products_in_bf16,
    "updates in two parts": decay_before,
    "averages as bf16 behind the sum": average_becomes(lambda gm, w: rounded(gm, w)),
    "averages as f16 behind the sum": average_becomes(lambda gm, w: rounded(gm, w, torch.float16)),
}
