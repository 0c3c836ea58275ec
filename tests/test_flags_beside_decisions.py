"""Flags and first counts that a step leaves, which decides by values: in each call, whichever
branch it takes, and not when it is captured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of, trained

on = False


def world() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_a_class() -> Loop:
    """A count begins at what the class has."""

    class State:
        steps = 0
        seen = False

    (model, optimizer), state = world(), State()

    def step(number: int, x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        if loss > 0.5:
            state.steps += 1
        if not state.seen:
            state.seen = True
            print("the first call")
        return loss

    return Loop(step, lambda: [model, vars(state), State.steps, State.seen])


def of_a_closure() -> Loop:
    """SwAV: a queue is used from then on where it is full."""
    (model, optimizer), queue, used = world(), torch.zeros(4), False

    def step(number: int, x: Tensor) -> Tensor:
        nonlocal used
        loss = trained(model, optimizer, x)
        if used or not torch.all(queue[-1] == 0):
            used = True
            loss = loss + queue.sum()
        queue[1:] = queue[:-1].clone()
        queue[0] = loss.detach()
        return loss

    def before(number: int) -> None:
        nonlocal used
        used = used and number != 5

    return Loop(step, lambda: [model, queue, used], before)


def of_a_module() -> Loop:
    (model, optimizer), state = world(), SimpleNamespace()

    def step(number: int, x: Tensor) -> Tensor:
        global on
        loss = trained(model, optimizer, x)
        loss = loss * 2 if loss > 0.5 else loss
        on = on or number > 2
        return loss

    def before(number: int) -> None:
        global on
        on = on and number != 0

    return Loop(step, lambda: [model, on, vars(state)], before)


def of_a_dictionary() -> Loop:
    """A logger whose counts begin at nothing (`defaultdict(int)` and `get`)."""
    (model, optimizer), counts = world(), dict[str, Any]()

    def step(number: int, x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        if "begun" not in counts:
            counts["begun"] = None
        if loss > 0.5:
            counts["large"] = counts.get("large", 0) + 1
        return loss

    return Loop(step, lambda: [model, counts])


def to_another_kind() -> Loop:
    (model, optimizer), state = world(), SimpleNamespace(phase=0, name=None)

    def step(number: int, x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        if loss > 1 and state.name is None:
            state.name = "large"
        elif state.name == "large":
            state.name = "behind"
        if state.phase == 0:
            state.phase = None
        return loss

    return Loop(step, lambda: [model, vars(state)])


@pytest.mark.parametrize(
    ("make", "graphs"),
    [(of_a_class, 4), (of_a_closure, 4), (of_a_module, 5), (of_a_dictionary, 4),
     (to_another_kind, 4)],
)  # fmt: skip
def test_each_call_leaves_what_eager_code_leaves(make: Callable[[], Loop], graphs: int) -> None:
    assert graphs_of(make) <= graphs


def test_a_flag_that_is_taken_back_is_set_once_more() -> None:
    """By a graph that is there, and not when it is captured."""
    (model, optimizer), state = world(), SimpleNamespace(on=False)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        loss = loss * 2 if loss > 1e6 else loss
        if not state.on:
            state.on = True
        return loss

    graphs = []
    for number in range(8):
        state.on = state.on and number % 3 != 0
        step(torch.ones(3, 4))
        assert state.on is True
        graphs.append(len(step.captures))
    assert graphs[-1] == graphs[3]


def test_a_set_beside_a_decision_is_refused() -> None:
    (model, optimizer), seen = world(), set[str]()

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        if loss > 0 and "large" not in seen:
            seen.add("large")
        return loss

    with pytest.raises(graphopt.CaptureError, match=r"changes seen"):
        step(torch.ones(3, 4))
    assert not seen
