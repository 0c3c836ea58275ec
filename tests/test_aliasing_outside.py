"""Memory that a program shares with a step: by attributes, by settings, by what the step leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from loops import Loop, graphs_of, run, trained


class World:
    """A model, and a tensor beside that may come to lie in its memory."""

    def __init__(self) -> None:
        self.model: Any = nn.Linear(4, 4)
        self.model.register_buffer("buffer", torch.ones(4))
        self.model.kept = torch.zeros(4)
        self.beside, self.table = torch.zeros(4), {"k": torch.zeros(4)}
        self.seen: Any = None


def buffer_in_an_attribute(world: World) -> None:
    world.model.kept = world.model.buffer


def view_of_a_weight_beside(world: World) -> None:
    world.beside = world.model.weight.detach()[0]


def weight_in_a_table(world: World) -> None:
    world.table["k"] = world.model.bias.data


def one_beside_in_both(world: World) -> None:
    world.model.kept = world.table["k"] = world.beside


def apart_again(world: World) -> None:
    world.model.kept, world.beside = world.model.kept.clone(), world.beside.clone()


def reading_then_writing(meet: Callable[[World], None]) -> Loop:
    world = World()

    def step(number: int, x: Tensor) -> Tensor:
        model = world.model
        with torch.no_grad():
            h = model(x)[0]
            world.beside.mul_(0.5)
            world.seen = h + model.buffer + model.weight[0] + model.bias
            model.kept.copy_(world.beside)
            world.table["k"].copy_(world.beside)
        return h

    def between(number: int) -> None:
        if number == 2:
            meet(world)
        if number == 4:
            apart_again(world)

    def left() -> Any:
        return [world.model, world.model.buffer, world.model.kept, world.beside, world.table,
                world.seen]  # fmt: skip

    return Loop(step, left, between)


@pytest.mark.parametrize(
    "meet", [buffer_in_an_attribute, view_of_a_weight_beside, weight_in_a_table, one_beside_in_both]
)
def test_every_call_is_eager_s(meet: Callable[[World], None]) -> None:
    graphs_of(lambda: reading_then_writing(meet), calls=6)


Step = Callable[[int, Tensor], Any]


def loop(
    make: Callable[[nn.Module, torch.optim.Optimizer], tuple[Step, Any]],
    before: Callable[[int, Any], Any] = lambda number, groups: None,
) -> Callable[[], Loop]:
    def made() -> Loop:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step, kept = make(model, optimizer)
        groups = optimizer.param_groups
        return Loop(
            step, lambda: [model, groups[0]["lr"], kept], lambda number: before(number, groups)
        )

    return made


class Rates:
    """A schedule of the program's, which holds the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.calls = optimizer.param_groups, 0
        self.base = [group["lr"] for group in self.groups]

    def step(self) -> None:
        self.calls += 1
        for group, base in zip(self.groups, self.base, strict=True):
            group["lr"] = base / self.calls


def by_an_object(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    rates, kept = Rates(optimizer), {}  # type: tuple[Rates, dict[str, Any]]

    def step(number: int, x: Tensor) -> Any:
        rates.step()
        kept["lr"] = rates.groups[0]["lr"]
        return trained(model, optimizer, x)

    return step, kept


def by_a_variable(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group = optimizer.param_groups[0]

    def step(number: int, x: Tensor) -> Any:
        group["lr"] = 0.05 / (number + 1)
        before = optimizer.param_groups[0]["lr"]
        loss = trained(model, optimizer, x)
        group.update(lr=group["lr"] * 0.5)
        return loss, before, optimizer.param_groups[0]["lr"], group is optimizer.param_groups[0]

    return step, None


def read_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group = optimizer.param_groups[0]

    def step(number: int, x: Tensor) -> Any:
        loss = trained(model, optimizer, x * group["lr"])
        return loss, group.get("lr"), "lr" in group, len(group), sorted(key for key in group)

    return step, None


def by_a_callback(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    group, kept = optimizer.param_groups[0], []  # type: Any, list[float]

    def step(number: int, x: Tensor) -> Any:
        group["lr"] = 0.05 / (number + 1)
        loss = trained(model, optimizer, x)
        graphopt.callback(kept.append, group["lr"])
        group["lr"] *= 0.5
        return loss

    return step, kept


def new_rate(number: int, groups: Any) -> None:
    groups[0]["lr"] = 0.05 / (number + 1)


CASES = {
    "by an object": loop(by_an_object),
    "by a variable": loop(by_a_variable),
    "read alone": loop(read_alone, new_rate),
    "by a callback": loop(by_a_callback),
}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_a_group_is_the_same_one_by_any_name(make: Callable[[], Loop]) -> None:
    assert graphs_of(make) == 1


def behind(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    weights = model.weight.detach().numpy()

    def step(number: int, x: Tensor) -> Any:
        return trained(model, optimizer, x), float(weights.sum())

    return step, None


def in_front(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, Any]:
    weights = model.weight.detach().numpy()

    def step(number: int, x: Tensor) -> Any:
        before = float(weights.sum())
        return trained(model, optimizer, x), before

    return step, None


@pytest.mark.parametrize("make", [in_front, behind])
def test_an_array_in_the_memory_of_a_parameter_is_refused(make: Any) -> None:
    with pytest.raises(CaptureError, match="computes with an array of numpy's"):
        run(loop(make), 3, compiled=True)


def flat_gradients(model: nn.Module, x: Tensor) -> Any:
    """As gradients are projected: flattened, changed and put back."""
    model(x).square().mean().backward()
    flat = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
    start = 0
    for p in model.parameters():
        assert p.grad is not None
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()
    return flat


def both_kept(model: nn.Module, x: Tensor) -> Any:
    first = model(x).detach() * 2
    second = torch.empty_like(first)
    second.copy_(first)
    return first, second


def of_a_parameter(model: nn.Module, x: Tensor) -> Any:
    kept = torch.empty_like(next(model.parameters()))
    with torch.no_grad():
        kept.copy_(next(model.parameters()))
    return kept


def of_an_argument(model: nn.Module, x: Tensor) -> Any:
    model.train()
    return torch.empty_like(x).copy_(x)


def of_a_view(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[1])
    kept.copy_(made[0])
    return made, kept


def of_gradients(model: nn.Module, x: Tensor) -> Any:
    kept = [torch.zeros_like(p) for p in model.parameters()]
    model(x).mean().backward()
    for to, p in zip(kept, model.parameters(), strict=True):
        assert p.grad is not None
        to.copy_(p.grad)
    return kept


def shared_as_well(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty_like(made)
    kept.copy_(made)
    return made, made.view(-1), kept


def other_strides(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[1], made.shape[0]).t()
    kept.copy_(made)
    return made, kept


def part(model: nn.Module, x: Tensor) -> Any:
    made = model(x).detach() * 2
    kept = torch.empty(made.shape[0], 2)
    kept.copy_(made[:, :2])
    return made, kept


def _left(step: Callable[..., Any], compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), torch.randn(2, 4)
    found = (graphopt.compile(step) if compiled else step)(model, x)
    results = [found] if isinstance(found, Tensor) else list(found)
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*results, x, *parameters, *gradients]


def _sharing(tensors: Sequence[Tensor]) -> list[list[bool]]:
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[one == other for one in places] for other in places]


STEPS = (flat_gradients, both_kept, of_a_parameter, of_an_argument, of_a_view, of_gradients,
         shared_as_well, other_strides, part)  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_memory_is_shared_as_in_eager(step: Callable[..., Any]) -> None:
    found, expected = (_left(step, compiled) for compiled in (True, False))
    assert _sharing(found) == _sharing(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_two_pairs_that_share_memory_are_refused() -> None:
    def step(model: nn.Module, x: Tensor) -> Any:
        made = model(x).detach() * 2
        kept = torch.empty_like(made)
        kept.copy_(made)
        return made, made.view(-1), kept, kept.view(-1)

    with pytest.raises(graphopt.CaptureError, match="share memory"):
        graphopt.compile(step)(nn.Linear(4, 3), torch.randn(2, 4))
