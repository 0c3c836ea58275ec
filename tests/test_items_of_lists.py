"""Tensors in lists that a step replaces: each call finds what the last one has left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Use = Callable[[list[Any], Tensor], Tensor]


def each_call(held: list[Any], y: Tensor) -> Tensor:
    result = y + held[0]
    held[0] = result.detach()
    return result


def all_of_them(held: list[Any], y: Tensor) -> Tensor:
    for index, value in enumerate(held):
        y = y + value
        held[index] = y.detach() * 0.5
    return y


def from_the_end(held: list[Any], y: Tensor) -> Tensor:
    result = y + held[-1]
    held[-1] = result.detach()
    return result + held[1]


def cached_by_shape(held: list[Any], y: Tensor) -> Tensor:
    if held[0].shape != (2, *y.shape):
        held[0] = torch.arange(2 * y.numel()).view(2, *y.shape).type(y.dtype)
    return (y * held[0]).sum(0)


def shifted(held: list[Any], y: Tensor) -> Tensor:
    result = y + held[0]
    held[1] = held[0]
    held[0] = result.detach()
    return result


def other_dtype(held: list[Any], y: Tensor) -> Tensor:
    held[0] = held[0].double() + y.detach()
    return y * held[0].float()


def with_another_one_appended(held: list[Any], y: Tensor) -> Tensor:
    result = y + held[0]
    held[0] = result.detach()
    held.append(y.detach())
    return result


def in_place_and_replaced(held: list[Any], y: Tensor) -> Tensor:
    held[0].add_(1)
    result = y + held[0]
    held[0] = result.detach()
    return result


USES: list[Use] = [
    each_call,
    all_of_them,
    from_the_end,
    cached_by_shape,
    shifted,
    other_dtype,
    with_another_one_appended,
    in_place_and_replaced,
]


class Program:
    """A list in an attribute of an object, of a module, in a dictionary, or in a closure."""

    def __init__(self, use: Use, place: str, shared: bool) -> None:
        torch.manual_seed(0)
        self.model = model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        second = torch.zeros(4, 2)
        held = self.held = [second if shared else torch.ones(4, 2), second]
        owner, table = SimpleNamespace(held=held), {"held": held}
        model.held = held  # type: ignore[assignment]
        ways: dict[str, Callable[[], Any]] = {
            "object": lambda: owner.held,
            "module": lambda: model.held,
            "dictionary": lambda: table["held"],
            "closure": lambda: held,
        }
        of = ways[place]

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = use(of(), model(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = step

    def left(self) -> list[Any]:
        return [tensor.tolist() for tensor in (*self.model.parameters(), *self.held)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("place", ["object", "module", "dictionary", "closure"])
@pytest.mark.parametrize("use", USES)
def test_as_in_eager_code(use: Use, place: str, shared: bool) -> None:
    captured, eager = Program(use, place, shared), Program(use, place, shared)
    step = graphopt.compile(captured.step)
    for call in range(6):
        if call == 4:  # the program puts another one there
            captured.held[0], eager.held[0] = torch.full((4, 2), 0.25), torch.full((4, 2), 0.25)
        x = torch.rand(4, 3)
        assert torch.equal(step(x), eager.step(x))
        assert captured.left() == eager.left()
    if use is each_call and not shared:
        assert len(step.captures) == 1


@pytest.mark.parametrize("kind", ["attributes", "items"])
def test_what_stands_in_two_places_at_first(kind: str) -> None:
    """`held.last = held.now` is seen although both are one tensor when the step is captured."""

    def program() -> tuple[Callable[[Tensor], Tensor], Callable[[], list[Any]]]:
        torch.manual_seed(0)
        model, zero = nn.Linear(3, 2), torch.zeros(4, 2)
        held: Any = SimpleNamespace(now=zero, last=zero)
        table: Any = held if kind == "attributes" else vars(held)

        def step(x: Tensor) -> Tensor:
            if kind == "attributes":
                y = model(x) + table.now
                table.last = table.now
                table.now = y.detach()
            else:
                y = model(x) + table["now"]
                table["last"] = table["now"]
                table["now"] = y.detach()
            y.sum().backward()
            return y.detach()

        return step, lambda: [held.now.tolist(), held.last.tolist()]

    (captured, left), (eager, expected) = program(), program()
    step = graphopt.compile(captured)
    for _ in range(4):
        x = torch.rand(4, 3)
        assert torch.equal(step(x), eager(x))
        assert left() == expected()
