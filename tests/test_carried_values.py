"""Tuples, lists and items of lists with tensors that a step finds and leaves, call after call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of

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


def list_left_alone(s: Any, call: int) -> None:
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


BETWEEN = (list_left_alone, another, longer, a_tuple, an_item, in_two_places)


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
    if step in ONE_GRAPH and between in (list_left_alone, another, an_item):
        assert graphs == 1
    if step is repackages:
        assert graphs <= 2  # states without a history, and with one


def moves(s: Any, out: Tensor) -> Any:
    s.kept, s.states = s.states, [out, s.states[0]]


def moves_a_tuple(s: Any, out: Tensor) -> Any:
    s.kept, s.pair = s.pair, (out, s.pair[0])


def puts_into_a_dictionary(s: Any, out: Tensor) -> Any:
    s.kept = {"old": s.states, "pair": s.pair}
    s.states, s.pair = [out], (out,)


def leaves_it_in_two_places(s: Any, out: Tensor) -> Any:
    s.kept = s.beside = s.states
    s.states = [out, s.kept[1]]
    return s.kept, s.beside


def leaves_a_part(s: Any, out: Tensor) -> Any:
    s.kept, s.nested = s.nested[0], ((out,), s.nested[0])


def shares(s: Any, out: Tensor) -> Any:
    s.kept = s.beside = s.states


MOVES = (
    moves,
    moves_a_tuple,
    puts_into_a_dictionary,
    leaves_it_in_two_places,
    leaves_a_part,
    shares,
)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_list_that_is_found_is_left_itself(move: Callable[..., Any], changed: bool) -> None:
    """What stands for it while the step is traced stays nowhere."""

    def trained(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        states, pair = [_zeros(), _zeros()], (_zeros(), _zeros())
        s = SimpleNamespace(states=states, pair=pair, nested=((_zeros(),), (_zeros(),)))

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            out = model(x + s.states[0] + s.pair[0] + s.nested[0][0])
            out.square().mean().backward()
            optimizer.step()
            return move(s, out.detach())

        run: Any = graphopt.compile(step) if compiled else step
        rows = []
        for call in range(5):
            if changed and call in (1, 3):
                s.states = [_zeros() + call, _zeros()]
            found = s.states, s.pair, s.nested[0]
            returned = run(torch.randn(2, 3))
            same = [s.kept is each for each in (*found, s.states, getattr(s, "beside", None))]
            rows.append((same, str((returned, s.kept, s.states, s.pair, s.nested))))
        return rows

    assert trained(True) == trained(False)


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


TensorsInListsStep = Callable[[Any, Any, Tensor], Any]


def changed_behind(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    h.mul_(2)


def a_buffer(s: Any, model: Any, h: Tensor) -> None:
    s.rows = s.rows[-2:] + [model.buffer]  # noqa: RUF005
    model.buffer.add_(1)


def tensor_in_list_and_attribute(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = h


def summed_before(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = sum(s.rows)
    h.mul_(2)


def stacked_before_and_behind(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.last = torch.stack(s.rows).sum(0)
    h.mul_(2)
    s.last = s.last + torch.stack(s.rows).sum(0)


def items_before(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    s.beside, s.last = s.rows[0], s.rows[-1] * 1
    h.mul_(2)


def another_list_of_them(s: Any, model: Any, h: Tensor) -> None:
    s.rows = [*s.rows[-2:], h]
    several = list(s.rows)
    h.mul_(2)
    s.last = several[-1]


def kept(step: TensorsInListsStep) -> Loop:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("buffer", torch.randn(4))
    s = SimpleNamespace(rows=[torch.randn(4)], beside=torch.randn(4), last=torch.randn(4))

    def run(number: int, x: Tensor) -> Tensor:
        h: Tensor = model(x[0]).detach()
        step(s, model, h)
        return h

    def between(number: int) -> None:
        s.beside.add_(0.5)
        s.last.mul_(0.5)
        model.buffer.add_(1)

    return Loop(run, lambda: [s.rows, s.beside, s.last, model.buffer], between)


@pytest.mark.parametrize(
    "step",
    [
        changed_behind,
        a_buffer,
        tensor_in_list_and_attribute,
        summed_before,
        stacked_before_and_behind,
        items_before,
        another_list_of_them,
    ],
)
def test_tensors_in_lists_are_eager_s_in_every_call(step: TensorsInListsStep) -> None:
    graphs_of(lambda: kept(step), calls=5)


def test_a_tensor_outside_is_not_put_into_a_list_that_is_read() -> None:
    def one_that_stands_outside(s: Any, model: Any, h: Tensor) -> None:
        s.rows = [*s.rows[-2:], s.beside]
        s.beside.add_(1)

    with pytest.raises(graphopt.CaptureError, match=r"reads s\.rows outside its arguments"):
        graphs_of(lambda: kept(one_that_stands_outside), calls=5)
