"""Gradients and optimizer state that a program has cut from one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


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
