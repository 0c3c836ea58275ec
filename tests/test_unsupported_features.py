"""Operators and features of torch that no capture knows are refused for what they are, and what the
message says to write instead gives the bits of eager code."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.optim import Optimizer
from torch.quasirandom import SobolEngine

import graphopt

Loss = Callable[[nn.Module, Tensor], Tensor]


class Tagged(torch.Tensor):
    pass


def plain(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x * 2
    return x * 3


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    by_script = torch.jit.script(plain)
    QUANTIZED = torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.qint8)
    ROWS = torch.eye(4).to_sparse_csr()


def in_a_thread(model: nn.Module, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return model(found[0]).square().mean()


async def awaited(x: Tensor) -> Tensor:
    return x * 2


def by_loop(model: nn.Module, x: Tensor) -> Tensor:
    loop = asyncio.new_event_loop()
    try:
        return model(loop.run_until_complete(awaited(x))).mean()  # type: ignore[no-any-return]
    finally:
        loop.close()


SOBOL = SobolEngine(6)


def own_generator(model: nn.Module, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return model(x + torch.randn(x.shape, generator=generator)).square().mean()


def seeded(model: nn.Module, x: Tensor) -> Tensor:
    GENERATOR.manual_seed(3)
    return model(x + torch.randn(x.shape, generator=GENERATOR)).square().mean()


GENERATOR = torch.Generator()


def heads(x: Tensor) -> Tensor:
    return x.reshape(1, 1, 4, 6).repeat(1, 1, 8, 1)


@torch.no_grad()
def attended(x: Tensor) -> Tensor:
    found = flex_attention(heads(x), heads(x), heads(x))
    assert isinstance(found, Tensor)
    return found[0, 0, :4]


REFUSED: dict[str, tuple[Loss, str, str]] = {
    "cond": (
        lambda m, x: torch.cond(
            x.sum() > 0, lambda y: m(y).sin(), lambda y: m(y).cos(), (x,)
        ).sum(),
        "it calls torch.cond",
        "if condition",
    ),
    "while_loop": (
        lambda m, x: m(
            while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.5), (torch.tensor(0), x))[1]
        ).mean(),
        "it calls while_loop",
        "while condition",
    ),
    "scan": (
        lambda m, x: m(scan(lambda c, y: (c + y, c * y), torch.zeros(6), x)[1]).mean(),
        "it calls scan",
        "for part in x",
    ),
    "flex_attention": (
        lambda m, x: m(attended(x)).mean(),
        "it calls flex_attention",
        "scaled_dot_product_attention",
    ),
    "compiled": (
        lambda m, x: torch.compile(m, backend="eager")(x).mean(),
        "that torch.compile compiled",
        "original",
    ),
    "quantized": (
        lambda m, x: m(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()).mean(),
        "quantized",
        "fake_quantize_per_tensor_affine",
    ),
    "quantized outside": (
        lambda m, x: m(x + QUANTIZED.dequantize()).mean(),
        "QUANTIZED is quantized",
        "dequantize",
    ),
    "sparse rows": (
        lambda m, x: m(
            torch.sparse_csr_tensor(torch.arange(5), torch.arange(4), torch.ones(4), (4, 4)) @ x
        ).mean(),
        "sparse tensor of a compressed layout",
        "outside the step",
    ),
    "mkldnn": (lambda m, x: m(x.to_mkldnn().to_dense()).mean(), "MKL-DNN", "leave out"),
    "nested": (
        lambda m, x: m(torch.nested.nested_tensor([x[:2], x[2:3]]).to_padded_tensor(0.0)).mean(),
        "nested tensor",
        "pad_sequence",
    ),
    "jagged": (
        lambda m, x: m(
            torch.nested.nested_tensor([x[:2], x[2:3]], layout=torch.jagged).unbind()[0]
        ).mean(),
        "NestedTensor",
        "pad_sequence",
    ),
    "scripted": (lambda m, x: m(by_script(x)).mean(), "TorchScript", "Python function"),
    "traced": (
        lambda m, x: m(torch.jit.trace(lambda y: y * 2, x)(x)).mean(),
        "torch.jit.trace",
        "function itself",
    ),
    "subclass": (lambda m, x: m(x.as_subclass(Tagged)).mean(), "class Tagged", "plain tensors"),
    "lazy": (lambda m, x: nn.LazyLinear(3)(m(x)).mean(), "lazy module", "outside the step"),
    "memory": (lambda m, x: m(x).mean() * x.untyped_storage().tolist()[0], "memory", "callback"),
    "thread": (in_a_thread, "in a thread", "thread of the step"),
    "event loop": (
        lambda m, x: m(asyncio.run(awaited(x))).mean(),
        "event loop of asyncio",
        "await around it",
    ),
    "event loop run to its end": (by_loop, "event loop of asyncio", "await around it"),
    "sobol": (
        lambda m, x: m(x + SobolEngine(6).draw(4)).mean(),
        "draws from a SobolEngine",
        "draw before the call",
    ),
    "sobol outside": (
        lambda m, x: m(x + SOBOL.draw(4)).mean(),
        "draws from a SobolEngine",
        "draw before the call",
    ),
    "address": (
        lambda m, x: m(x).mean() * len({p.data_ptr() for p in m.parameters()}),
        "where the memory",
        "compare tensors",
    ),
    "address of a storage": (
        lambda m, x: m(x).mean() * (x.untyped_storage().data_ptr() % 2 + 1),
        "where the memory",
        "compare tensors",
    ),
    "addresses by map": (
        lambda m, x: m(x).mean() * len(set(map(methodcaller("data_ptr"), m.parameters()))),
        "where the memory",
        "compare tensors",
    ),
    "is set to": (
        lambda m, x: m(x).mean() * (1 + x.is_set_to(x.view(4, 6))),
        "where the memory",
        "compare tensors",
    ),
    "own generator": (own_generator, "makes a generator", "outside the step"),
    "seeded": (seeded, r"calls manual_seed\(\) of a generator", "before the step"),
}


def decided(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).sin() if x.sum() > 0 else model(x).cos()).sum()


def looped(model: nn.Module, x: Tensor) -> Tensor:
    while x.norm() < 50:
        x = x * 1.5
    return model(x).mean()


def scanned(model: nn.Module, x: Tensor) -> Tensor:
    carried, found = torch.zeros(6), []
    for part in x:
        found.append(carried * part)
        carried = carried + part
    return model(torch.stack(found)).mean()


CURED: dict[str, Loss] = {
    "cond": decided,
    "while_loop": looped,
    "scan": scanned,
    "map": lambda m, x: torch.func.vmap(m)(x).mean(),
    "attention": lambda m, x: m(
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x))[0, 0, :4]
    ).mean(),
    "quantized": lambda m, x: m(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)).mean(),
    "sparse rows": lambda m, x: m(torch.sparse.mm(ROWS, x)).mean(),
    "nested": lambda m, x: m(
        torch.nn.utils.rnn.pad_sequence([x[:2], x[2:3]], batch_first=True)
    ).mean(),
    "address": lambda m, x: m(x).mean() * len({id(p) for p in m.parameters()}),
    "generator": lambda m, x: m(x + torch.randn(x.shape, generator=GENERATOR)).mean(),
}


def trained(loss_of: Loss, model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run(loss_of: Loss, compiled: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    GENERATOR.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(lambda m, o, x: trained(loss_of, m, o, x))
    losses = [step(model, optimizer, torch.randn(4, 6)).detach() for _ in range(3)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refused_for_what_it_is(name: str) -> None:
    loss_of, reason, cure = REFUSED[name]
    run(loss_of, lambda function: function)
    with pytest.raises(graphopt.CaptureError, match=reason) as refusal:
        run(loss_of, graphopt.compile)
    assert cure in str(refusal.value.hint)
    assert "test_unsupported_features.py" in str(refusal.value.location)


@pytest.mark.parametrize("name", CURED)
def test_what_to_write_instead(name: str) -> None:
    ours, expected = (run(CURED[name], each) for each in (graphopt.compile, lambda f: f))
    assert all(map(torch.equal, ours, expected))
