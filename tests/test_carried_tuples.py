"""Tuples of tensors that each call finds and replaces, as recurrent networks carry their state."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphopt

Effect = Callable[[Any, nn.LSTMCell, Tensor], Any]


class State(NamedTuple):
    h: Tensor
    c: Tensor


def detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(detached(each) for each in value)


def of_a_cell(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    kept.state = detached(kept.state)
    kept.state = cell(x, kept.state)
    return kept.state[0]


def taken_apart(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    h, c = cell(x, kept.state)
    kept.state = h.detach(), c.detach()
    return h


def begun(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    if kept.state is None or len(kept.state) != 2:
        kept.state = x.new_zeros(3, 4), x.new_zeros(3, 4)
    return of_a_cell(kept, cell, x)


def named(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    state = State(*map(detached, kept.state))
    kept.state = State(*cell(x, (state.h, state.c)))._replace(c=state.c * 0.5)
    return kept.state.h


def nested(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    (h, c), count = kept.layers
    h, c = cell(x, (h.detach(), c.detach()))
    kept.layers = (h, c), count + 1
    return h * count


def read_elsewhere(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    kept.former.append(kept.state[0])
    return of_a_cell(kept, cell, x) + kept.first[0]


def one_twice(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    h, _ = cell(x, detached(kept.state))
    kept.state = h, h
    return h


def in_a_dictionary(kept: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
    states = kept.states
    states["a"] = cell(x, detached(states["a"]))
    return states["a"][1]


EFFECTS = {
    of_a_cell: 2,
    taken_apart: 2,
    begun: 3,
    named: 2,
    nested: 2,
    read_elsewhere: 2,
    one_twice: 6,
    in_a_dictionary: 2,
}


def nothing(kept: Any, call: int) -> None:
    pass


def replaced(kept: Any, call: int) -> None:
    if call == 2:
        kept.state = kept.layers[0][0], kept.layers[0][1]
    elif call == 3:
        kept.state = State(*kept.state)
    elif call == 4:
        kept.state = (kept.state[0].detach(),) * 2


def run(effect: Effect, compiled: bool, between: Callable[[Any, int], None]) -> Any:
    torch.manual_seed(1)
    cell = nn.LSTMCell(5, 4)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

    def state() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 4), torch.randn(3, 4)

    first = state()
    kept = SimpleNamespace(state=None if effect is begun else first, former=[], first=first)
    kept.layers, kept.states = (state(), torch.ones(())), {"a": state()}

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out: Tensor = effect(kept, cell, x)
        out.square().mean().backward()
        optimizer.step()
        return out.detach()

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for call, x in enumerate(torch.randn(6, 3, 5)):
        found.append([used(x).tolist(), plain(vars(kept))])
        between(kept, call)
    return found, len(used.captures) if compiled else 0


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(each) for each in value]
    return value


@pytest.mark.parametrize("effect", EFFECTS)
def test_each_call_finds_the_tuple_of_the_last(effect: Effect) -> None:
    expected, _ = run(effect, False, nothing)
    found, captures = run(effect, True, nothing)
    assert found == expected
    assert captures <= EFFECTS[effect]


@pytest.mark.parametrize("effect", [of_a_cell, begun])
def test_another_kind_of_tuple_is_captured_anew(effect: Effect) -> None:
    expected, _ = run(effect, False, replaced)
    found, captures = run(effect, True, replaced)
    assert found == expected
    assert captures <= 6
