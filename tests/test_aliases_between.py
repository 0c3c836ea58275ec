"""A program that lets an attribute be a parameter or buffer of its model between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import Loop, graphs_of


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
