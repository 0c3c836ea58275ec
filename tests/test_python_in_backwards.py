"""Python code that a backward runs: what checkpoints compute again, hooks, functions of the
program's. All of it finds what lies outside, as code of the forward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import graphopt
from gloo import Pool
from graphopt.ir.bits import same_bits

SCALE = torch.tensor([1.0, 0.5, 2.0, 0.25])
ROWS = np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32)
SEEN: list[Tensor] = []
SETTINGS = {"gain": 1.5, "scale": torch.tensor(0.75)}


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * SCALE

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = context.saved_tensors
        SEEN.append(gradient.norm())
        return gradient * SCALE * SETTINGS["scale"] + x.sign() * torch.from_numpy(ROWS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)) * SCALE)))


def of_checkpoint(model: Net, x: Tensor) -> Tensor:
    return checkpoint(model.body, x, use_reentrant=False).sum()


def of_reentrant(model: Net, x: Tensor) -> Tensor:
    return checkpoint(model.body, x * 1.0, use_reentrant=True).sum()


def of_two_checkpoints(model: Net, x: Tensor) -> Tensor:
    half = checkpoint(lambda h: model.norm(h * SETTINGS["scale"]), x, use_reentrant=False)
    return checkpoint(lambda h: model.last(h) * SETTINGS["gain"], half, use_reentrant=False).sum()


def of_sequence(model: Net, x: Tensor) -> Tensor:
    parts = [model.first, model.norm, nn.Tanh(), model.last]
    return checkpoint_sequential(parts, 2, x * SCALE, use_reentrant=False).sum()


def of_array(model: Net, x: Tensor) -> Tensor:
    def body(h: Tensor) -> Tensor:
        return model.first(h) * torch.from_numpy(ROWS) + model.last(h) * float(ROWS[1])

    return checkpoint(body, x, use_reentrant=False).sum()


def of_autocast(model: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(lambda h: model.last(model.first(h) * SCALE), x, use_reentrant=False)
    return out.float().sum()


def of_hook(model: Net, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden.register_hook(lambda gradient: gradient * SCALE)
    return (hidden * hidden).sum()


def of_hook_that_keeps(model: Net, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.first(x))
    hidden.register_hook(lambda gradient: SEEN.append(gradient.abs().max() * SETTINGS["scale"]))
    return (hidden * SCALE).sum()


def of_parameter_hook(model: Net, x: Tensor) -> Tensor:
    handle = model.first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * SCALE)
    (model.first(x) ** 2).sum().backward()
    handle.remove()
    return model.last(x).sum()


def of_accumulated(model: Net, x: Tensor) -> Tensor:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(SETTINGS["scale"])

    handle = model.first.weight.register_post_accumulate_grad_hook(halve)
    (model.first(x) ** 2).sum().backward()
    handle.remove()
    return model.last(x).sum()


def of_module_hook(model: Net, x: Tensor) -> Tensor:
    handle = model.last.register_full_backward_hook(
        lambda module, given, found: (given[0] * SCALE, *given[1:])
    )
    result = model.last(torch.tanh(model.first(x))).square().sum()
    result.backward()
    handle.remove()
    return model.first(x).sum()


def of_function(model: Net, x: Tensor) -> Tensor:
    return _Scaled.apply(model.first(x)).square().sum()


def of_saved_tensors(model: Net, x: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        return tensor * 2.0

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed * SETTINGS["scale"]):
        return torch.tanh(x @ model.first.weight).exp().sum()


def of_gradient_in_checkpoint(model: Net, x: Tensor) -> Tensor:
    def body(h: Tensor) -> Tensor:
        out = torch.tanh(model.first(h)) * SCALE
        (gradient,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        return gradient * SETTINGS["scale"]

    return checkpoint(body, x.requires_grad_(), use_reentrant=False).square().sum()


STEPS = [
    of_checkpoint,
    of_reentrant,
    of_two_checkpoints,
    of_sequence,
    of_array,
    of_autocast,
    of_hook,
    of_hook_that_keeps,
    of_parameter_hook,
    of_accumulated,
    of_module_hook,
    of_function,
    of_saved_tensors,
    of_gradient_in_checkpoint,
]


def _trained(loss: Callable[[Net, Tensor], Tensor], compiled: bool) -> list[Tensor]:
    def step(model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(model, x)
        found.backward()
        optimizer.step()
        return found.detach()

    torch.manual_seed(2)
    SEEN.clear()
    SCALE.copy_(torch.tensor([1.0, 0.5, 2.0, 0.25]))
    model = Net()
    model.norm.weight.data.uniform_(0.5, 1.5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run: Any = graphopt.compile(step) if compiled else step
    losses = []
    for number in range(4):
        if number == 2:
            SCALE.mul_(1.25)  # by the program, between two calls
        losses.append(run(model, optimizer, torch.randn(5, 4, requires_grad=True)))
    state = [*model.parameters(), *model.buffers(), torch.tensor(model.calls)]
    return [each.detach().clone() for each in (*losses, *SEEN, *state, torch.rand(1))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", STEPS)
def test_as_in_eager_code(loss: Callable[[Net, Tensor], Tensor]) -> None:
    theirs, ours = _trained(loss, compiled=False), _trained(loss, compiled=True)
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, other), (number, mine, other)


# Checkpoints that run a backward within a backward, on several ranks


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, way: Callable[[Layers, Tensor], Tensor]) -> Tensor:
        return way(self, self.layers[0](x))

    def half(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.layers[2](torch.tanh(self.layers[1](x)))))


def _reentrantly(function: Any, *args: Tensor) -> Tensor:
    found: Tensor = checkpoint(function, *args, use_reentrant=True)
    return found


def of_middle(model: Layers, x: Tensor) -> Tensor:
    return model.layers[3](_reentrantly(model.half, x)) + x


def of_last(model: Layers, x: Tensor) -> Tensor:
    return _reentrantly(lambda h: model.layers[3](model.half(h)), x)


def of_one_in_another(model: Layers, x: Tensor) -> Tensor:
    return _reentrantly(lambda h: model.layers[3](_reentrantly(model.half, h) * h), x)


def of_one_behind_another(model: Layers, x: Tensor) -> Tensor:
    parts = [*model.layers[1:], nn.Tanh()]
    return checkpoint_sequential(nn.Sequential(*parts), 3, x, use_reentrant=True)


def of_a_parameter_given(model: Layers, x: Tensor) -> Tensor:
    weight = model.layers[3].weight
    return (
        _reentrantly(lambda h, w: torch.tanh(h @ w), model.half(x), weight) + model.layers[3].bias
    )


def of_one_among_others(model: Layers, x: Tensor) -> Tensor:
    inner = _reentrantly(model.layers[1], x)
    outer: Tensor = checkpoint(lambda h: model.layers[2](h) * inner, x, use_reentrant=False)
    return model.layers[3](outer)


REENTRANT = [
    of_middle,
    of_last,
    of_one_in_another,
    of_one_behind_another,
    of_a_parameter_given,
    of_one_among_others,
]
ENDINGS = ["plain", "clipped", "twice", "twice, watched between", "twice, hooked"]


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _trained_on(rank: int, ranks: int, way: Any, ending: str, compiled: bool) -> list[Tensor]:
    torch.manual_seed(3)
    model = Layers()
    net: Any = model
    if not compiled:
        net = DistributedDataParallel(model)
    if ending == "twice, hooked":
        model.layers[1].weight.register_post_accumulate_grad_hook(_halve)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        averages_once = ending == "twice" and not compiled  # docs/exactness.md
        with net.no_sync() if averages_once else nullcontext():
            loss = net(x, way).square().mean()
            loss.backward()
        if ending.startswith("twice"):
            if ending == "twice, watched between":
                loss = loss + model.layers[2].weight.grad.norm()
            net(x + 1.0, way).square().mean().backward()
        if ending == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    run: Any = graphopt.compile(step, pipeline="none" if ranks > 2 else "default")
    torch.manual_seed(rank)
    losses = [(run if compiled else step)(torch.randn(3, 4)) for _ in range(3)]
    if compiled:
        run.flush()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *(p.detach() for p in model.parameters()), *gradients, torch.rand(1)]


def _compare_reentrant(rank: int, ranks: int, ending: str) -> None:
    """On three ranks last bits depend on the buckets, and DDP keeps one for all parameters of such
    models."""
    agree = same_bits if ranks == 2 else functools.partial(torch.allclose, rtol=0.0, atol=1e-6)
    for way in REENTRANT:
        theirs = _trained_on(rank, ranks, way, ending, compiled=False)
        ours = _trained_on(rank, ranks, way, ending, compiled=True)
        assert len(ours) == len(theirs)
        assert all(map(agree, ours, theirs)), (way.__name__, ours, theirs)


@pytest.mark.parametrize("ending", ENDINGS)
def test_reentrant_checkpoints_on_two_ranks(two_ranks: Pool, ending: str) -> None:
    two_ranks.run(_compare_reentrant, 2, ending)


@pytest.mark.full
@pytest.mark.parametrize("ending", ENDINGS)
def test_reentrant_checkpoints_on_three_ranks(three_ranks: Pool, ending: str) -> None:
    three_ranks.run(_compare_reentrant, 3, ending)
