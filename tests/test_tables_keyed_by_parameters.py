"""Dictionaries and sets in which a step looks for parameters, and their identities."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphopt
from twins import assert_same

CALLS = 4

Make = Callable[[nn.Module], Callable[[Tensor, Tensor], Any]]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def trained(make: Make, compiled: bool) -> tuple[list[Any], list[Tensor], Any]:
    torch.manual_seed(0)
    net = network()
    step: Any = make(net)
    step = graphopt.compile(step) if compiled else step
    results = [step(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(CALLS)]
    return results, [p.detach() for p in net.parameters()], step


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def in_backward(net: nn.Module) -> Any:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in net.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(net, x, y)
        loss.backward()
        return loss.detach()

    return step


def by_scale(net: nn.Module) -> Any:
    """Numbers by parameter, some of which are left out."""
    scales = {p: 0.5 + n for n, p in enumerate(net.parameters()) if n != 1}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        for p in net.parameters():
            p.grad.mul_(scales.get(p, 0.0))  # type: ignore[union-attr]
        optimizer.step()
        return loss.detach()

    return step


def frozen_set(net: nn.Module) -> Any:
    frozen = {next(net.parameters())}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        for p in net.parameters():
            if p in frozen:
                p.grad = None
        optimizer.step()
        return loss.detach()

    return step


def identities(net: nn.Module) -> Any:
    """Identities that were noted outside the step, and others that are noted in it."""
    decayed = {id(p) for p in net.parameters() if p.ndim > 1}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        seen: set[int] = set()
        for p in [*net.parameters(), *net.parameters()]:
            if id(p) in decayed and id(p) not in seen:
                loss = loss + 0.01 * p.square().sum()
            seen.add(id(p))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def tensors_by_parameter(net: nn.Module) -> Any:
    """Tensors by parameter, updated in place and in a loop over the dictionary."""
    momenta = OrderedDict((p, torch.zeros_like(p)) for p in net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(net, x, y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, momentum in momenta.items():
                momentum.mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
            for p in net.parameters():
                p.sub_(momenta[p], alpha=0.1)
        return loss.detach()

    return step


def replaced_by_parameter(net: nn.Module) -> Any:
    """Another tensor in each call."""
    averages = {p: p.detach().clone() for p in net.parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                averages[p] = averages[p] * 0.9 + p * 0.1
        return [averages[p] for p in net.parameters()]

    return step


@pytest.mark.parametrize(
    "make",
    [in_backward, by_scale, frozen_set, identities, tensors_by_parameter, replaced_by_parameter],
)
def test_containers_by_parameter(make: Make) -> None:
    eager, captured = trained(make, False), trained(make, True)
    assert_same(list(captured[:2]), list(eager[:2]), make.__name__)
    assert len(captured[2].captures) <= 2


FINDERS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "in a list": lambda p, held: p in [each for each in held if each.shape == p.shape],
    "index": lambda p, held: [each for each in held if each.shape == p.shape].index(p),
    "intersection": lambda p, held: len({p} & set(held[:2])),
    "difference": lambda p, held: len({p, *held} - {held[1]}),
    "new dictionary": lambda p, held: dict.fromkeys(held, 1.0) | {p: 3.0},
    "get": lambda p, held: {each: n for n, each in enumerate(held)}.get(p, -1),
    "pop": lambda p, held: {each: n for n, each in enumerate(held[:2])}.pop(p, -1),
    "equal": lambda p, held: (p == held[0]).float().mean() if p.shape == held[0].shape else 0,
}


@pytest.mark.parametrize("name", FINDERS)
def test_parameters_are_found_among_those_held_elsewhere(name: str) -> None:
    """Whatever looks for one, in containers that the step makes of tensors that it closes over."""

    def make(net: nn.Module) -> Any:
        held = list(net.parameters())

        def step(x: Tensor, y: Tensor) -> Any:
            found = [FINDERS[name](p, held) for p in net.parameters()]
            numbers = [len(each) if isinstance(each, dict) else each for each in found]
            return loss_of(net, x, y).detach() * sum(numbers)

        return step

    eager, captured = trained(make, False), trained(make, True)
    assert_same(list(captured[:2]), list(eager[:2]), name)


def test_another_value_for_a_parameter_is_seen() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = network()
        first = net[0].weight
        scales = {first: 1.0}

        def scaled(x: Tensor, net: Any = net, scales: Any = scales) -> Tensor:
            return sum(p.sum() * scales.get(p, 2.0) for p in net.parameters()) + net(x).sum()

        step: Any = graphopt.compile(scaled) if compiled else scaled
        with torch.no_grad():
            values = [step(torch.ones(2, 6))]
            scales[first] = 3.0
            values.append(step(torch.ones(2, 6)))
            del scales[first]
            scales[net[2].bias] = 5.0
            values.append(step(torch.ones(2, 6)))
        assert list(scales) == [net[2].bias] and next(iter(scales)) is net[2].bias
        found.append([value.detach() for value in values])
    assert_same(found[1], found[0], "values")


def test_a_refused_step_leaves_the_keys() -> None:
    net = network()
    scales = dict.fromkeys(net.parameters(), 1.0)
    known = set(net.parameters())

    def step(x: Tensor) -> float:
        for p in net.parameters():
            scales[p] += 1.0 if p in known else 0.0
        raise ValueError("of the step's own")

    with pytest.raises(graphopt.CaptureError):
        graphopt.capture(step, torch.ones(2, 6))
    assert all(a is b for a, b in zip(scales, net.parameters(), strict=True))
    assert list(scales.values()) == [1.0] * 4
    assert {id(p) for p in known} == {id(p) for p in net.parameters()}


class Holder:
    """Has a parameter that is the model's."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter


def test_is_of_a_parameter_held_elsewhere() -> None:
    """Which of two names of one tensor a step compares is not seen while it is traced."""
    net = network()
    holder = Holder(net[0].weight)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        skipped = [p for p in model.parameters() if p is holder.parameter]
        return model(x) * len(skipped)

    with pytest.raises(graphopt.CaptureError, match="asks whether a tensor"):
        graphopt.capture(step, net, torch.ones(2, 6))


def hooks_that_hold(net: nn.Module) -> Any:
    """Looked up by tensors that functions hold themselves, and by those of the model."""
    scales = {p: 0.5 + n for n, p in enumerate(net.parameters())}
    known = set(net.parameters())
    for p in net.parameters():
        p.register_hook(lambda g, p=p: g * scales[p] if p in known else g)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x, y) * sum(scales[p] for p in net.parameters())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def filled_once(net: nn.Module) -> Any:
    ranks: dict[Tensor, int] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        for p in net.parameters():
            if p not in ranks:
                ranks[p] = p.ndim
        return loss_of(net, x, y).detach() * sum(ranks[p] for p in net.parameters())

    return step


@pytest.mark.parametrize("make", [hooks_that_hold, filled_once])
def test_held_and_filled(make: Make) -> None:
    eager, captured = trained(make, False), trained(make, True)
    assert_same(list(captured[:2]), list(eager[:2]), make.__name__)


def test_parameters_that_a_step_keeps() -> None:
    """In a dictionary there are the model's own then, not what stood for them."""
    net = network()
    table: dict[Any, Any] = {}
    names: dict[str, Any] = {}

    def step(x: Tensor) -> Tensor:
        for name, p in net.named_parameters():
            names[name] = p
            table[p] = name
        return net(x)

    graphopt.compile(step)(torch.ones(2, 6))
    own = list(net.parameters())
    assert {id(p) for p in names.values()} == {id(p) for p in table} == {id(p) for p in own}
