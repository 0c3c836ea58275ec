"""Tensors in attributes of parameters and buffers that a step uses before their module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Binarized(nn.Linear):
    """As in BinaryNet, and what follows it: the real weight stands beside the one in use."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not hasattr(weight, "org"):
            weight.org = weight.data.clone()
        weight.data = weight.org.sign()
        return nn.functional.linear(x, weight)


def _binary(compiled: bool, forward_first: bool) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(Binarized(3, 4, False), nn.Hardtanh(), Binarized(4, 2, False))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    parameters: list[Any] = list(net.parameters())
    if forward_first:
        net(torch.randn(2, 3))

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters:
            if hasattr(parameter, "org"):
                parameter.data.copy_(parameter.org)
        optimizer.step()
        for parameter in parameters:
            if hasattr(parameter, "org"):
                parameter.org.copy_(parameter.data.clamp_(-1, 1))
        return loss

    called = graphopt.compile(step) if compiled else step
    losses = [called(torch.randn(2, 3)).item() for _ in range(4)]
    return [losses, [p.tolist() for p in parameters], [p.org.tolist() for p in parameters]]


@pytest.mark.parametrize("forward_first", [False, True])
def test_a_binarized_net(forward_first: bool) -> None:
    assert _binary(True, forward_first) == _binary(False, forward_first)


def test_marks_read_before_the_module() -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        net: Any = nn.Linear(3, 2)
        net.register_buffer("scale", torch.ones(2))
        net.scale.note, net.weight.mask, net.weight.score = (
            torch.ones(2), torch.ones(2, 3), torch.zeros(2, 3),
        )  # fmt: skip

        def step(x: Tensor) -> Tensor:
            net.weight.score.add_(net.weight.mask)
            total: Tensor = (net.scale.note * net(x)).square().sum() + net.weight.score.sum()
            total.backward()
            net.weight.grad.mul_(net.weight.mask)
            return total

        called = graphopt.compile(step) if compiled else step
        found = []
        for index in range(4):
            found.append(called(torch.randn(2, 3)).item())
            if index == 1:
                net.weight.mask = torch.zeros(2, 3)  # another one
            if index == 2:
                net.scale.note.fill_(2)
        return [found, net.weight.score.tolist(), net.weight.grad.tolist()]

    assert run(True) == run(False)


def _both(parameters: list[Any], net: Any, kind: str, loss: Tensor) -> Any:
    """Attributes set by one way to a parameter, and read by the other."""
    if kind == "made where none is":
        for each in parameters:
            if not hasattr(each, "state"):
                each.state = torch.zeros_like(each)
        for each in net.parameters():
            each.state.add_(each.grad)
        return [getattr(each, "state", None).sum() for each in parameters]  # type: ignore[union-attr]
    if kind == "counted":
        for each in net.parameters():
            each.count = getattr(each, "count", 0) + 1
        return [each.count for each in parameters]
    if kind == "a number of the graph":
        parameters[0].last = loss.item()
        return net.weight.last * 2
    if kind == "set by name":
        setattr(net.weight, "last", loss.detach())  # noqa: B010
        return getattr(parameters[0], "last") + 1  # noqa: B009
    if kind == "taken away":
        parameters[0].last = loss.detach()
        found = net.weight.last + 1
        del net.weight.last
        return found, hasattr(parameters[0], "last")
    parameters[0].note = torch.ones(2, 3)
    net.weight.note = net.weight.note * 2
    return parameters[0].note.sum()


@pytest.mark.parametrize(
    "kind",
    ["made where none is", "counted", "a number of the graph", "set by name", "taken away", "anew"],
)
def test_attributes_are_those_of_one_tensor(kind: str) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        parameters: list[Any] = list(net.parameters())

        def step(x: Tensor) -> Any:
            net.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return _both(parameters, net, kind, loss)

        called = graphopt.compile(step) if compiled else step
        return [repr(called(torch.randn(2, 3))) for _ in range(3)]

    assert run(True) == run(False)


def test_the_dictionary_of_attributes_is_refused() -> None:
    net: Any = nn.Linear(3, 2)
    weight: Any = net.weight

    @graphopt.compile
    def step(x: Tensor) -> Any:
        loss = net(x).sum()
        net.weight.note = 1
        return loss, "note" in vars(weight)

    with pytest.raises(graphopt.CaptureError, match="reads the dictionary of attributes"):
        step(torch.randn(2, 3))
