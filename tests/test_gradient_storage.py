"""Gradients changed by hand in a step (`p.grad.data = new` and its kin), and gradients and state
that a program has cut from one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt
from twins import Twins, World, assert_same

Step = Callable[[nn.Module, Optimizer, Tensor, Tensor], Any]


def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data = p.grad.data * 0.5
    optimizer.step()
    return loss


def kept(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the call before is still there, and stays the same object."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data = p.grad.data.clamp(-0.1, 0.1)
    optimizer.step()
    return loss


def zeroed_by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def kept_and_replaced(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    first = next(model.parameters())
    assert first.grad is not None
    first.grad.data = first.grad.data * 0.0
    first.grad.data += 0.25
    first.grad = first.grad * 2.0
    optimizer.step()
    return loss


def in_place(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients[0].data.zero_()
    gradients[1].data.copy_(torch.ones_like(gradients[1]))
    gradients[1].data.mul_(0.5).add_(1.0)
    optimizer.step()
    gradients[0].data.fill_(0.125)
    return loss


def none_in_between(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two losses; the gradients of the first one are taken away and put back."""
    F.mse_loss(model(x), y).backward()
    own = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    loss = model(x).abs().mean()
    loss.backward()
    for p, gradient in zip(model.parameters(), own, strict=True):
        assert p.grad is not None
        assert gradient is not None
        p.grad = p.grad * 0.5 + gradient
    optimizer.step()
    return loss


def shared(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A gradient gets the storage of another tensor, and is written to by either name."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    first = next(model.parameters())
    assert first.grad is not None
    other = first.detach() * 0.1
    first.grad.data = other
    other.add_(1.0)
    first.grad.mul_(2.0)
    optimizer.step()
    return other


def of_activations(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """What autograd has saved of an activation: the tensor itself, or its result."""
    optimizer.zero_grad()
    hidden = model(x)
    squared, grown = hidden * hidden, hidden.exp()
    hidden.data = hidden.data * 2.0
    grown.data = grown.data + 1.0
    loss = (squared + grown - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss


STEPS = [
    scaled,
    kept,
    zeroed_by_hand,
    kept_and_replaced,
    in_place,
    none_in_between,
    shared,
    of_activations,
]


def build(step: Step) -> World:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    return World(step, [model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_by_hand(step: Step) -> None:
    twins = Twins(lambda: build(step))
    for _ in range(4):
        twins.step(torch.randn(5, 4), torch.randn(5, 3))
    twins.finish()
    assert len(twins.compiled.captures) <= 2


def test_who_holds_a_gradient_or_its_storage() -> None:
    """The gradient is the same tensor, over other storage; whoever has the old one keeps it."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = graphopt.compile(kept) if compiled else kept
        seen = []
        step(model, optimizer, torch.randn(5, 4), torch.randn(5, 3))
        gradient = model.weight.grad
        assert gradient is not None
        storage = gradient.detach()
        for _ in range(3):
            step(model, optimizer, torch.randn(5, 4), torch.randn(5, 3))
            assert model.weight.grad is gradient
            seen += [gradient.clone(), storage.clone()]
        found.append(seen)
    assert_same(found[1], found[0], "gradients")


def test_data_of_an_argument() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)

        def normalized(model: nn.Module, x: Tensor) -> Tensor:
            x.data = x.data / x.data.norm()
            x.data.mul_(2.0)
            return model(x)

        step: Any = graphopt.compile(normalized) if compiled else normalized
        seen = []
        for _ in range(3):
            x = torch.randn(5, 4)
            before = x.detach()
            seen += [step(model, x).detach(), x, before]
        found.append(seen)
    assert_same(found[1], found[0], "arguments")


def locked(model: nn.Module, x: Tensor) -> Tensor:
    """Masks as older programs make them: of a tensor without elements, which is resized."""
    mask = x.data.new().resize_(x.shape[0], 1).bernoulli_(0.5)
    scale = x.data.new().resize_((1, x.shape[1])).fill_(2.0)
    like = torch.empty(0).resize_as_(x).zero_()
    like.add_(mask.expand_as(x) * scale)
    return model(like * x)


def test_tensors_that_begin_without_elements() -> None:
    twins = Twins(lambda: World(locked, [nn.Linear(4, 3)], []))
    for _ in range(3):
        twins.step(torch.randn(5, 4))
    twins.finish(captures=1)


def _net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return net, torch.optim.Adam(net.parameters(), 0.01)


def _give_parts(net: nn.Module, flat: Tensor) -> None:
    parameters = list(net.parameters())
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.reshape(parameter.shape)


def _run(compiled: bool, begin: str) -> list[Any]:
    net, optimizer = _net()

    def step(x: Tensor) -> Any:
        if begin != "keep":
            optimizer.zero_grad(set_to_none=begin == "none")
        net(x).square().sum().backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        _give_parts(net, flat.clamp(-1, 1))
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return [p.grad.storage_offset() for p in net.parameters() if p.grad is not None]

    called = graphopt.compile(step) if compiled else step
    results: list[Any] = []
    for index in range(5):
        found = called(torch.randn(2, 3))
        kept = [p.grad for p in net.parameters() if p.grad is not None]
        if index == 2:  # whoever has one of them writes to this one alone
            kept[1].add_(1)
        values = [t.detach().tolist() for t in (*net.parameters(), *kept)]
        storages = {t.untyped_storage().data_ptr() for t in kept}
        results.append((found, values, len(storages)))
    return results


@pytest.mark.parametrize("begin", ["none", "zero", "keep"])
def test_gradients_that_the_step_cuts_from_one_tensor(begin: str) -> None:
    assert _run(True, begin) == _run(False, begin)


def test_gradients_and_state_that_are_parts_before_the_first_call() -> None:
    def run(compiled: bool) -> list[Any]:
        net, _ = _net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        count = sum(p.numel() for p in net.parameters())
        gradients, moments = torch.ones(count), torch.zeros(count)
        _give_parts(net, gradients)
        places = moments.split([p.numel() for p in net.parameters()])
        for parameter, place in zip(net.parameters(), places, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = place.view_as(parameter)

        def step(x: Tensor) -> Tensor:
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        called = graphopt.compile(step) if compiled else step
        losses = [called(torch.randn(2, 3)).item() for _ in range(3)]
        return [losses, gradients.tolist(), moments.tolist()]

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_between_each_other() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        nets = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        first, second = nets.parameters()
        memory = torch.ones(18)
        first.grad, second.grad = memory[::2].view(3, 3), memory[1::2].view(3, 3)

        def step(x: Tensor) -> None:
            nets[1](nets[0](x)).sum().backward()

        called = graphopt.compile(step) if compiled else step
        for _ in range(2):
            called(torch.randn(2, 3))
        return [memory.tolist(), first.grad.tolist(), second.grad.tolist()]

    assert run(True) == run(False)


@pytest.mark.parametrize("place", ["one", "part"])
def test_gradients_over_one_place_are_refused(place: str) -> None:
    nets = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    first, second = nets.parameters()
    memory = torch.ones(18)
    first.grad = memory[:9].view(3, 3)
    second.grad = memory[0 if place == "one" else 6 :][:9].view(3, 3)

    @graphopt.compile
    def step(x: Tensor) -> None:
        nets[1](nets[0](x)).sum().backward()

    with pytest.raises(graphopt.CaptureError, match=r"0.weight.grad and 1.weight.grad share"):
        step(torch.randn(2, 3))
