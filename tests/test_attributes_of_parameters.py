"""Tensors that a program keeps as attributes of parameters and buffers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphopt
from twins import assert_same

CALLS = 5


class Curvature(torch.optim.Optimizer):
    """Estimates the diagonal of the Hessian by products with random signs, and keeps it in an
    attribute of each parameter, a number at first."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for p in self.members():
            p.hess = 0.0

    def members(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.members():
            if not isinstance(p.hess, float):
                p.hess.zero_()
        parameters = self.members()
        signs = [torch.randint_like(p, 2) * 2.0 - 1.0 for p in parameters]
        gradients = [p.grad for p in parameters]
        products = torch.autograd.grad(gradients, parameters, grad_outputs=signs)
        for p, product, sign in zip(parameters, products, signs, strict=True):
            p.hess += product * sign
            p.addcdiv_(p.grad, p.hess.abs() + 1.0, value=-self.param_groups[0]["lr"])


def curvature(net: nn.Module) -> Any:
    optimizer = Curvature(net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a cycle, which zero_grad breaks
            loss.backward(create_graph=True)
        optimizer.step()
        return loss.detach()

    return step


def averages(net: nn.Module) -> Any:
    """Made in the first call, and another tensor in each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        for p in net.parameters():
            before = getattr(p, "average", None)
            p.average = p.detach().clone() if before is None else before * 0.5 + p.detach() * 0.5  # type: ignore[attr-defined]
        return [p.average for p in net.parameters()]  # type: ignore[attr-defined]

    return step


def masks(net: nn.Module) -> Any:
    """Read only, and a flag that the step sets."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for n, p in enumerate(net.parameters()):
        p.mask = (torch.rand_like(p) < 0.5).to(p.dtype) if n else None  # type: ignore[attr-defined]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for p in net.parameters():
            mask: Any = p.mask  # type: ignore[attr-defined]
            if mask is not None:
                p.grad.mul_(mask)  # type: ignore[union-attr]
            p.pruned = mask is not None  # type: ignore[attr-defined]
        optimizer.step()
        return loss.detach()

    return step


NAMES = {"hess", "average", "mask", "pruned"}


def marks(net: nn.Module) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(p).items() if k in NAMES} for p in net.parameters()]


@pytest.mark.parametrize("make", [curvature, averages, masks])
@pytest.mark.parametrize("exchanged", [False, True], ids=["", "exchanged"])
def test_tensors_on_parameters(make: Any, exchanged: bool) -> None:
    found, step = [], None
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        step = graphopt.compile(make(net)) if compiled else make(net)
        results = []
        for number in range(CALLS):
            results.append(step(torch.randn(4, 6), torch.randint(3, (4,))))
            results[-1] = torch.utils._pytree.tree_map(torch.clone, results[-1])
            if exchanged and number == 2:  # another tensor between two calls
                for table in map(vars, net.parameters()):
                    for name in NAMES & table.keys():
                        if isinstance(table[name], Tensor):
                            table[name] = table[name].clone() * 0.5
        found.append([results, marks(net), [p.detach() for p in net.parameters()]])
    assert_same(found[1], found[0], make.__name__)
    assert len(step.captures) <= 2


def test_an_attribute_that_a_step_deletes_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.once = 1.0  # type: ignore[attr-defined]

    def step(model: nn.Module, x: Tensor) -> Any:
        del model.weight.once
        return model(x)

    with pytest.raises(graphopt.CaptureError, match="deletes the attribute once of weight"):
        graphopt.capture(step, model, torch.ones(1, 2))
    assert model.weight.once == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("of", ["model", "layer", "optimizer"])
@pytest.mark.parametrize("value", [3, torch.ones(2), [torch.ones(2)]], ids=str)
def test_an_attribute_of_a_module_or_optimizer_that_a_step_deletes_is_refused(
    of: str, value: Any
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    owner: Any = {"model": model, "layer": model[0], "optimizer": optimizer}[of]
    owner.once = value

    def step(x: Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()
        del owner.once
        owner.other = 3
        del owner.other

    with pytest.raises(graphopt.CaptureError, match=r"deletes the attribute [\w.]*once") as refused:
        graphopt.compile(step)(torch.ones(1, 2))
    assert owner.once is value and "del owner.once" in str(refused.value)


def test_a_refused_step_leaves_the_attributes() -> None:
    model = nn.Linear(2, 2)
    model.weight.mask = mask = torch.ones(2, 2)  # type: ignore[attr-defined]

    def step(model: Any, x: Tensor) -> Any:
        model.weight.mask = model.weight.mask * 2.0
        raise ValueError("of the step's own")

    with pytest.raises(graphopt.CaptureError):
        graphopt.capture(step, model, torch.ones(1, 2))
    assert model.weight.mask is mask


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
