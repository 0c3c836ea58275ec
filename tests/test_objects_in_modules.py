"""Objects that a step leaves in attributes of modules, or finds there and replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import graphopt
from loops import Loop, graphs_of, trained


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Kept:
    value: Any


def an_object(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = Kept([x * 2, {"loss": loss.item(), "inner": Kept(x)}])


def of_a_parameter(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = Kept(model.weight)
    return model.kept.value.sum().detach()


def in_a_list(model: Any, x: Tensor, loss: Tensor) -> Any:
    model.kept = [Kept(x), Kept(loss.detach())]


def shown(value: Any) -> Any:
    if isinstance(value, Kept):
        return "Kept", shown(value.value)
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, shown(each)) for key, each in items]
    return value


@pytest.mark.parametrize("use", [an_object, of_a_parameter, in_a_list])
def test_each_call_leaves_an_object_of_its_own(use: Callable[..., Any]) -> None:
    def make() -> Loop:
        model = nn.Linear(4, 1)
        model.kept = None  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        former: list[Any] = []

        def step(number: int, x: Tensor) -> Any:
            loss = trained(model, optimizer, x)
            return loss, use(model, x, loss)

        return Loop(step, lambda: shown(model.kept), lambda number: former.append(model.kept))

    assert graphs_of(make, 4) <= 2


def plain_object(model: Any, x: Tensor) -> None:
    model.kept = Plain(x)


def without_tensors(model: Any, x: Tensor) -> None:
    model.kept = Plain(1)


def a_set(model: Any, x: Tensor) -> None:
    model.kept = [{1, 2}]


def an_array(model: Any, x: Tensor) -> None:
    model.kept = np.zeros(2)


def a_function(model: Any, x: Tensor) -> None:
    model.kept = lambda: x * 2


def a_distribution(model: Any, x: Tensor) -> None:
    """As the actor of rsl_rl keeps the last one."""
    model.kept = Normal(x, x.abs() + 1)


def of_a_parameter_of_the_model(model: Any, x: Tensor) -> None:
    model.weight.kept = Plain(1)


def a_set_of_a_parameter(model: Any, x: Tensor) -> None:
    model.weight.kept = {1}


@pytest.mark.parametrize(
    "leaves",
    [plain_object, without_tensors, a_set, an_array, a_function, a_distribution,
     of_a_parameter_of_the_model, a_set_of_a_parameter],
)  # fmt: skip
def test_other_objects_are_refused(leaves: Callable[..., Any]) -> None:
    """Each call would have to leave another one."""
    model = nn.Linear(4, 1)
    model.kept = None  # type: ignore[assignment]

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        leaves(model, x)
        return model(x).sum().detach()

    with pytest.raises(graphopt.CaptureError, match="that no call can make anew") as refused:
        step(torch.ones(2, 4))
    assert "put the tensor there" in str(refused.value)
    assert model.kept is None
    assert not vars(model.weight)


def test_one_object_in_two_places_is_one_in_each_call() -> None:
    model = nn.Linear(4, 1)
    model.kept = model.other = None  # type: ignore[assignment]

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        model.kept = model.other = Kept(x)  # type: ignore[assignment]
        return model(x).sum().detach()

    found = []
    for number in range(2):
        x = torch.full((2, 4), float(number))
        step(x)
        found.append(model.kept)
        assert model.kept is model.other
        assert str(shown(model.kept)) == str(shown(Kept(x)))
    assert found[0] is not found[1]


class TwoLists(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.one: list[Any] = []
        self.other: list[Any] = []
        self.table: dict[str, Any] = {}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_list_in_two_places_is_one(elsewhere: bool) -> None:
    @graphopt.compile(pipeline="none")
    def step(model: TwoLists, x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        model.one = [loss.item(), 1.0]
        if elsewhere:
            model.table["other"] = model.one
        else:
            model.other = model.one

    model = TwoLists()
    for _ in range(2):
        step(model, torch.ones(2, 3))
        assert model.one is (model.table["other"] if elsewhere else model.other)
        assert len(model.one) == 2


@dataclasses.dataclass
class Settings:
    scale: float


class Agent(nn.Module):
    """Keeps what it has seen, as minimalRL's agents do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.rows: list[Any] = [0.5]
        self.table, self.settings, self.state = {"k": 0.5}, Settings(0.5), None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def emptied(agent: Any, y: Tensor) -> Any:
    factor = sum(agent.rows) + len(agent.rows)
    agent.rows = []
    return factor


def swapped(agent: Any, y: Tensor) -> Any:
    former, agent.rows = agent.rows, []
    return torch.tensor([*former, 1.0]).sum()


def trimmed(agent: Any, y: Tensor) -> Any:
    agent.rows.append(1.0)
    agent.rows = agent.rows[-3:]
    return 1.0


def replaced_table(agent: Any, y: Tensor) -> Any:
    factor = agent.table["k"]
    agent.table = {"k": 3.0}
    return factor


def replaced_object(agent: Any, y: Tensor) -> Any:
    factor = agent.settings.scale
    agent.settings = Settings(2.0)
    return factor


def of_tensors(agent: Any, y: Tensor) -> Any:
    """A recurrent network's hidden state, which is an input."""
    before = (y.detach(), y.detach() * 0) if agent.state is None else agent.state
    agent.state = (before[0] * 0.5 + y.detach(), before[1] + 1)
    return agent.state[0].mean() + agent.state[1].mean()


def table_of_tensors(agent: Any, y: Tensor) -> Any:
    factor = 1.0 if agent.state is None else agent.state["y"].mean()
    agent.state = {"y": y.detach()}
    return factor


def by_the_program(agent: Any, number: int) -> None:
    agent.rows.extend([float(number)] * (number % 3 + 1))
    agent.table["k"] = agent.settings.scale = number + 1.0


def nothing(agent: Any, number: int) -> None:
    """Each call finds what the one before has left."""


@pytest.mark.parametrize("between", [by_the_program, nothing])
@pytest.mark.parametrize(
    "use",
    [emptied, swapped, trimmed, replaced_table, replaced_object, of_tensors, table_of_tensors],
)
def test_each_call_goes_by_what_is_there(
    use: Callable[..., Any], between: Callable[..., Any]
) -> None:
    def make() -> Loop:
        agent = Agent()
        optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)

        def step(number: int, x: Tensor) -> Tensor:
            return trained(agent, optimizer, x * use(agent, agent(x)))

        def left() -> Any:
            return [agent, agent.rows, agent.table, agent.settings.scale, agent.state]

        return Loop(step, left, lambda number: between(agent, number))

    graphs_of(make, 6)


def test_a_tuple_of_tensors_needs_no_graph_for_each_call() -> None:
    def make() -> Loop:
        agent = Agent()
        optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)

        def step(number: int, x: Tensor) -> Tensor:
            return trained(agent, optimizer, x * of_tensors(agent, agent(x)))

        return Loop(step, lambda: [agent, agent.state])

    assert graphs_of(make, 6) <= 3


def test_each_call_leaves_a_list_of_its_own() -> None:
    """To which the program appends."""
    kept = []

    def make() -> Loop:
        agent = Agent()
        optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)

        def step(number: int, x: Tensor) -> Tensor:
            agent.rows, agent.table = [], {"k": [1.0]}  # type: ignore[dict-item]
            return trained(agent, optimizer, x)

        def left() -> Any:
            kept.append(agent.rows)
            agent.rows.append(1.0)
            agent.table["k"].append(2.0)  # type: ignore[attr-defined]
            return [agent, list(agent.rows), agent.table]

        return Loop(step, left)

    expected = graphs_of(make, 4)
    assert expected <= 2
    assert len(set(map(id, kept))) == len(kept)


@pytest.mark.parametrize("new", [list, lambda: [0.5]], ids=["empty", "equal"])
def test_a_list_that_equals_the_former_one_is_another_list(new: Callable[[], list[Any]]) -> None:
    """The program has kept the former one, and changes it."""

    def make() -> Loop:
        agent = Agent()
        agent.rows = new()
        optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)
        kept: list[Any] = []

        def step(number: int, x: Tensor) -> Tensor:
            factor = 1.0 + len(agent.rows)
            agent.rows = new()
            return trained(agent, optimizer, x * factor)

        def between(number: int) -> None:
            if number == 2:
                kept.append(agent.rows)
            for rows in kept if number == 4 else ():
                rows.append(7.0)

        return Loop(step, lambda: [agent, agent.rows, kept], between)

    graphs_of(make, 7)


def listed(agent: Any, x: Tensor) -> Tensor:
    """As the encoder of monodepth2."""
    agent.rows = []
    agent.rows.append(agent.layer(x))
    agent.rows.append(agent.rows[-1] * 2)
    return agent.rows[-1]


def tabled(agent: Any, x: Tensor) -> Tensor:
    agent.table = {}
    agent.table["out", 0] = agent.layer(x)
    agent.table.setdefault("rows", []).append(agent.table["out", 0])
    agent.table["k"] = agent.table.pop(("out", 0)) * len(agent.table)
    return agent.table["k"]


def kept_elsewhere(agent: Any, x: Tensor) -> Tensor:
    agent.rows = []
    agent.rows.append(agent.layer(x))
    agent.state = agent.rows
    agent.rows = []
    agent.rows.append(agent.state[0] * 3)
    agent.state.append(agent.rows[0])
    return agent.state[-1]


@pytest.mark.parametrize("between", [by_the_program, nothing])
@pytest.mark.parametrize("forward", [listed, tabled, kept_elsewhere])
def test_a_forward_that_runs_several_times_begins_a_container_each_time(
    forward: Callable[..., Tensor], between: Callable[..., Any]
) -> None:
    def make() -> Loop:
        agent = Agent()
        optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)

        def step(number: int, x: Tensor) -> Tensor:
            (forward(agent, x) * forward(agent, x + 1)).mean().backward()
            optimizer.step()
            return forward(agent, x).detach()

        def left() -> Any:
            return [agent, agent.rows, list(map(str, agent.table)), agent.state]

        return Loop(step, left, lambda number: between(agent, number))

    graphs = graphs_of(make, 5)
    assert between is by_the_program or graphs <= 2
