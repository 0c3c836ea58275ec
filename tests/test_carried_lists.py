"""Lists of tensors, or of tuples of tensors, that a step carries from call to call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Step = Callable[[Any, Any, Tensor], Tensor]


def _zeros() -> Tensor:
    return torch.zeros(2, 3)


def replaces(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    out = x
    for state in s.states:
        out = torch.tanh(model(out + state))
    s.states = [out.detach(), x]
    return out


def memories(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    """As Transformer-XL has them."""
    hidden = [x]
    for memory in s.states:
        hidden.append(torch.tanh(model(hidden[-1] + memory.mean(0))))
    with torch.no_grad():
        s.states = [torch.cat([s.states[i], hidden[i]])[-2:] for i in range(len(s.states))]
    return hidden[-1]


def repackages(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    """As AWD-LSTM's language model does."""

    def repackaged(state: Any) -> Any:
        return state.detach() if isinstance(state, Tensor) else [repackaged(v) for v in state]

    states, new, out = repackaged(s.pairs), [], x
    for hidden, cell in states:
        cell = cell * 0.5 + torch.tanh(model(out))
        out = torch.tanh(cell + hidden)
        new.append((out, cell))
    s.pairs = new
    return out


def shifts(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    first = s.states[0]
    s.states = s.states[1:] + [model(x).detach()]  # noqa: RUF005
    out: Tensor = model(x + first)
    return out


def updates_in_place(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    s.states[0].add_(1)
    return replaces(s, model, x)


def keeps_the_old(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    s.kept = s.states
    return replaces(s, model, x)


def one_tensor_twice(s: Any, model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x + s.states[0] + s.states[1])
    state = out.detach()
    s.states = [state, state]
    return out


ONE_GRAPH = (replaces, memories, shifts, updates_in_place)
STEPS: tuple[Step, ...] = (
    *ONE_GRAPH, repackages, keeps_the_old, one_tensor_twice
)  # fmt: skip


def nothing(s: Any, call: int) -> None:
    """The program leaves the list as it is."""


def another(s: Any, call: int) -> None:
    if call in (2, 4):
        s.states = [_zeros() + call, _zeros()]


def longer(s: Any, call: int) -> None:
    if call in (2, 4):
        s.states = [_zeros() + call, _zeros(), _zeros()]


def a_tuple(s: Any, call: int) -> None:
    if call in (2, 4):
        s.states = (_zeros() + call, _zeros())


def an_item(s: Any, call: int) -> None:
    if call in (2, 4):
        s.states[0] = _zeros() + call


def in_two_places(s: Any, call: int) -> None:
    s.kept = s.states


BETWEEN = (nothing, another, longer, a_tuple, an_item, in_two_places)


def _run(step: Step, between: Callable[[Any, int], None], compiled: bool) -> tuple[Any, int]:
    torch.manual_seed(0)
    model, pairs = nn.Linear(3, 3), [(_zeros(), _zeros()), (_zeros(), _zeros())]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    s = SimpleNamespace(states=[_zeros(), _zeros()], pairs=pairs, rows=[], kept=None)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = step(s, model, x)
        out.square().mean().backward()
        optimizer.step()
        return out.detach()

    run: Any = graphopt.compile(train) if compiled else train
    rows = []
    for call in range(6):
        between(s, call)
        out = run(torch.randn(2, 3))
        left = [*s.states, *(each.detach() for pair in s.pairs for each in pair)]
        kept = [each.tolist() for each in s.kept or ()]
        rows.append([out.tolist(), [each.tolist() for each in left], kept, s.kept is s.states])
        rows.append([each if isinstance(each, str) else len(each) for each in s.rows])
    return rows, len(run.captures) if compiled else 0


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("step", STEPS)
def test_every_call_is_eager_s(step: Step, between: Callable[[Any, int], None]) -> None:
    if step is shifts and between is a_tuple:
        pytest.skip("a list cannot be added to a tuple")
    expected, _ = _run(step, between, compiled=False)
    found, graphs = _run(step, between, compiled=True)
    assert found == expected
    if step in ONE_GRAPH and between in (nothing, another, an_item):
        assert graphs == 1
    if step is repackages:
        assert graphs <= 2  # states without a history, and with one


def test_a_variable_of_a_closure() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, states, rows = nn.Linear(3, 3), [_zeros(), _zeros()], []

        def step(x: Tensor, model: nn.Module = model) -> Tensor:
            nonlocal states
            out: Tensor = model(x + states[0]) + states[1]
            states = [out.detach(), states[0]]
            return out.detach()

        run: Any = graphopt.compile(step) if compiled else step
        for _ in range(5):
            rows.append([run(torch.randn(2, 3)).tolist(), [each.tolist() for each in states]])
        found.append(rows)
        assert not compiled or len(run.captures) == 1
    assert found[0] == found[1]
