"""Functions that `graphopt.testing.pretended` runs in a process of its own."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import graphopt
from graphopt import executable
from graphopt.graph_utils import get_outputs, is_operator
from graphopt.lowering import compile_triton
from graphopt.saved import save_graph
from graphopt.stages import default_pipeline


class Block(nn.Module):
    """Attention with dropout behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(50, 64), nn.Linear(64, 192), nn.Linear(64, 50)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shape = (*tokens.shape, 4, 16)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.mix(x).split(64, -1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = F.dropout(found.transpose(1, 2).reshape(x.shape), 0.1)
        return F.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


def train(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss: Tensor = model(tokens)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _training() -> tuple[Any, Any, Tensor]:
    model = Block().to("cuda")
    assert model.out.weight is model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, torch.zeros(2, 16, dtype=torch.long, device="cuda")


def operators(graph: fx.Graph) -> Counter[str]:
    targets = (n.target for n in graph.nodes if isinstance(n.target, OpOverload))
    return Counter(target._schema.name for target in targets)


def compiled() -> tuple[str, int, Counter[str]]:
    """Three calls of a compiled step: where the loss is, captures, operators."""
    step = graphopt.compile(train)
    arguments = _training()
    losses = [step(*arguments) for _ in range(3)]
    graph = step.captures[-1].graph_module.graph
    return str(losses[-1].device), len(step.captures), operators(graph)


def among_ranks(verify: str) -> tuple[int, Counter[str], Counter[str], int]:
    """Captured, passed through the default pipeline and finalized, as one rank of many."""
    captured = graphopt.capture(train, *_training(), parallel=graphopt.DataParallel())
    before = operators(captured.graph_module.graph)
    gm = graphopt.IterGraphModule(captured.graph_module)
    manager = graphopt.PassManager(default_pipeline(), verify=verify)
    records = manager.run(gm)
    executable.finalize(gm)
    return dist.get_world_size(), before, operators(gm.graph), len(records)


def normalized() -> tuple[int, list[str]]:
    """A step with BatchNorm in float32, whose statistics are read after the forward: operators of
    cuDNN that write unseen, and what the reader gets."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to("cuda")
    average = torch.zeros(4, device="cuda")

    def step(model: Any, average: Tensor, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        average.copy_(model[1].running_mean)
        return loss

    x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    graph = graphopt.capture(step, model, average, x).graph_module.graph
    unseen = sum(is_operator(n.target, "aten::cudnn_batch_norm") for n in graph.nodes)
    values = {c.args[0].name: c.args[1] for c in get_outputs(graph).updates}
    sources = [str(values[name].args[0].target) for name in values if "average" in name]
    assert values[next(n for n in values if "average" in n)] in values.values()
    return unseen, sources


GRADIENTS, BATCH = (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor), 4


class Sums(TorchDispatchMode):
    """The order in which gradients of matrices are computed and added."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in GRADIENTS and result.dim() == 2 and len(result) != BATCH:
            self.found.append((str(func), tuple(result.shape)))
        return result


def penalized(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Gradients by way of gradients (a penalty), and by two plain ways."""
    mixed = (x + y).requires_grad_(True)
    slope = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)[0]
    loss: Tensor = model(x).mean() - model(y).mean() + (slope.norm(2, dim=1) - 1).square().mean()
    loss.backward()
    return loss


def double_backward() -> tuple[list[Any], list[Any]]:
    """In which order eager adds gradients, and the graph."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to("cuda")
    x, y = (torch.randn(BATCH, 6, device="cuda") for _ in range(2))
    penalized(model, x, y)  # the first backward of a process begins the thread of the device
    model.zero_grad()
    with Sums() as eager:
        penalized(model, x, y)
    model.zero_grad()
    graph = graphopt.capture(penalized, model, x, y).graph_module.graph
    values = ((node, node.meta["val"]) for node in graph.nodes if node.target in GRADIENTS)
    ours = [(str(n.target), tuple(v.shape)) for n, v in values if v.dim() == 2 and len(v) != BATCH]
    return eager.found, ours


def kernels() -> int:
    """How many kernels a small step is, compiled to machine code of the device."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).to("cuda")

    def step(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    captured = graphopt.capture(step, model, torch.randn(4, 8, device="cuda"))
    return len(list(compile_triton(captured.graph_module, target="cuda:90")))


def save(path: str) -> None:
    save_graph(graphopt.capture(train, *_training()).graph_module, Path(path))


def coverage(names: list[str]) -> dict[str, tuple[int, int]]:
    """Of cases of the coverage set, by name: nodes, and kernels compiled to machine code."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from cases import cases

    found = {}
    torch.set_default_device("cuda")
    for name in names:
        case = cases()[name]()
        gm = graphopt.capture(case.step, *case.calls[0]).graph_module
        kernels = list(compile_triton(gm, target="cuda:90"))
        found[name] = len(gm.graph.nodes), len(kernels)
        torch._dynamo.reset()
    return found


def everything(with_kernels: bool) -> dict[str, Any]:
    """All of the above that needs no ranks, in one process."""
    return {
        "compiled": compiled(),
        "normalized": normalized(),
        "double_backward": double_backward(),
        "recurrent": recurrent(),
        "kernels": kernels() if with_kernels else 0,
    }


def raises() -> None:
    raise ZeroDivisionError("on purpose")


def gives_a_tensor() -> Tensor:
    return torch.zeros(3, device="cuda")


def ends() -> None:
    os._exit(3)


def recurrent() -> str:
    """What is said of a recurrent layer of cuDNN."""
    model = nn.LSTM(4, 5).to("cuda")

    def step(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)[0].square().mean()
        loss.backward()
        return loss

    try:
        graphopt.capture(step, model, torch.randn(3, 2, 4, device="cuda"))
    except graphopt.CaptureError as error:
        other = nn.LSTM(4, 5).to("cuda")
        with torch.backends.cudnn.flags(enabled=False):  # as its hint says
            graphopt.capture(step, other, torch.randn(3, 2, 4, device="cuda"))
        return f"{error.reason} {error.hint} {error.location}"
    return "captured"
