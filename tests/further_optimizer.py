"""A step with a fused optimizer that torch does not have, in a process whose table has a row of it
before anything reads the table. Prints what was found: see test_table_rows.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.ir.families import FUSED_OPTIMIZERS

FUSED_OPTIMIZERS["_fused_plain"] = (0,)  # the row

import graphopt  # noqa: E402
from graphopt.graph_utils import find_nodes, is_list_operator  # noqa: E402
from graphopt.ir.operators import is_fused_optimizer  # noqa: E402


def in_place(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, lr: float, **scaling: Any
) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.sub_(gradient * lr)


def functional(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor], *, lr: float, **scaling: Any
) -> tuple[list[Tensor], list[Tensor]]:
    new = [t - gradient * lr for t, gradient in zip(tensors, gradients, strict=True)]
    return new, [gradient.clone() for gradient in gradients]


def define(library: torch.library.Library) -> None:
    """The operator, both forms of it, for a learning rate that is a number and one in a tensor, as
    torch has its own. Its form in place has no shapes for the latter, nor have torch's."""
    kernels: dict[str, Callable[..., Any]] = {"_fused_plain_": in_place, "_fused_plain": functional}
    for name, kernel in kernels.items():
        written = name.endswith("_")
        lists = ("Tensor(a!)[]", "Tensor(b!)[]") if written else ("Tensor[]", "Tensor[]")
        given = "()" if written else "(Tensor[] self_out, Tensor[] grads_out)"
        for overload, rate in (("", "float"), (".tensor_lr", "Tensor")):
            form = f"{name}{overload}"
            library.define(
                f"{form}({lists[0]} self, {lists[1]} grads, *, {rate} lr,"
                f" Tensor? grad_scale=None, Tensor? found_inf=None) -> {given}"
            )
            library.impl(form, kernel, "CPU")
            if not (written and overload):
                library.impl(form, kernel, "Meta")
    torch._fused_plain_ = torch.ops.aten._fused_plain_  # type: ignore[attr-defined]


class Plain(torch.optim.Optimizer):
    """SGD, by one call for each group of parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            torch._fused_plain_(used, [p.grad for p in used], lr=group["lr"])  # type: ignore[attr-defined]


def step(model: nn.Module, optimizer: Plain, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    """Train beside eager mode, then lose an update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    ours, theirs = Plain(model.parameters(), 0.1), Plain(twin.parameters(), 0.1)
    compiled = graphopt.compile(step)
    for index in range(4):
        x = torch.full((3, 4), 0.5 + index)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
        assert torch.equal(compiled(model, ours, x), step(twin, theirs, x))
    compiled.flush()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    blocks = graphopt.optim.get_all_fused_optimizer_blocks(compiled.graph_module)
    assert all(is_list_operator(node) for block in blocks for node in block.optim.nodes)
    gm = graphopt.capture(step, model, ours, x).graph_module
    before = copy.deepcopy(gm)
    (update,) = find_nodes(gm.graph, is_fused_optimizer)
    tensors, gradients = update.args[:2]
    update.args = (tensors, [gradients[1], *gradients[1:]])  # type: ignore[index, misc]
    refused = not graphopt.verify.check_equivalence(before, gm).ok
    print(len(compiled.captures), sum(len(block.optim.grads) for block in blocks), refused)


if __name__ == "__main__":
    plain = torch.library.Library("aten", "FRAGMENT")
    define(plain)
    main()
