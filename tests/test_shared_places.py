"""One tensor in several places, in some of which a step puts another one: whoever has the former
one keeps it, and where the places have different tensors in another call, each has its own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from twins import assert_same

Body = Callable[[Any, Any, Tensor], Tensor]


def replaces(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * model.kept + other.held
    model.kept = model.kept * 0.9
    return y


def replaces_unread(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * other.held
    model.kept = y.detach()
    return y


def leaves_the_former(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * model.kept
    other.held = model.kept
    model.kept = model.kept * 0.9
    return y


def gives_it_to_the_other(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * model.kept + other.held
    other.held = model.kept
    return y


def takes_it_from_the_other(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * model.kept + other.held
    model.kept = other.held
    return y


def replaces_alone(model: Any, other: Any, y: Tensor) -> Tensor:
    y = y * model.kept
    model.kept = model.kept + 1
    return y + model.kept


def of_another_shape(model: Any, other: Any, y: Tensor) -> Tensor:
    if model.kept.shape != (2, *y.shape):
        model.kept = torch.stack([y.detach(), y.detach() + 1])
    return (y * model.kept).sum(0) + other.held


BODIES = [
    replaces,
    replaces_unread,
    leaves_the_former,
    gives_it_to_the_other,
    takes_it_from_the_other,
    replaces_alone,
    of_another_shape,
]


class Program:
    """A module that keeps a tensor, as a buffer or not, and another object that has it as well.

    Args:
        closed: the step closes over both; else the module is an argument.
    """

    def __init__(self, body: Body, is_buffer: bool, shared: bool, closed: bool) -> None:
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 2)
        self.model = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_buffer:
            model.register_buffer("kept", torch.full((4, 2), 0.5))
        else:
            model.kept = torch.full((4, 2), 0.5)
        self.other = other = SimpleNamespace(held=model.kept if shared else torch.ones(4, 2))

        def step(given: Any, x: Tensor) -> Tensor:
            model.zero_grad()
            loss = body(model if closed else given, other, model(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step, self.given = step, None if closed else model

    def changed(self, call: int) -> None:
        """The program lets them be one tensor, or two."""
        if call == 2:
            self.other.held = self.model.kept
        elif call == 4:
            self.other.held = torch.full((4, 2), 0.3)

    def left(self) -> list[Any]:
        values = [*self.model.parameters(), self.model.kept, self.other.held]
        return [value.tolist() for value in values]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_as_in_eager_code(body: Body, is_buffer: bool, shared: bool, closed: bool) -> None:
    captured, eager = (Program(body, is_buffer, shared, closed) for _ in range(2))
    step = graphopt.compile(captured.step)
    for call in range(6):
        if body is not of_another_shape:
            captured.changed(call)
            eager.changed(call)
        x = torch.rand(4, 3)
        assert torch.equal(step(captured.given, x), eager.step(eager.given, x))
        assert captured.left() == eager.left()
        assert (captured.model.kept is captured.other.held) == (
            eager.model.kept is eager.other.held
        )


class Filling(nn.Module):
    """Makes buffers in its first forward, and where a batch has more rows than any before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.rows = nn.Linear(3, 2), kind, 0
        self.table: Tensor | None
        if kind == "declared":
            self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            self.rows = len(x)
            table = torch.arange(2.0 * self.rows).view(-1, 2).cos()
            if self.kind == "declared":
                self.table = table
            else:
                self.register_buffer("table", table, persistent=self.kind == "persistent")
        assert self.table is not None
        result: Tensor = self.linear(x) * self.table[: len(x)]
        return result


@pytest.mark.parametrize("kind", ["declared", "persistent", "temporary"])
def test_buffers_that_a_forward_makes(kind: str) -> None:
    torch.manual_seed(0)
    captured = Filling(kind)
    eager = copy.deepcopy(captured)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss.detach()

    run = graphopt.compile(step)
    for rows in (4, 3, 5, 5, 4):
        x = torch.rand(rows, 3)
        assert torch.equal(run(captured, x), step(eager, x))
        found, expected = captured.state_dict(), eager.state_dict()
        assert list(found) == list(expected)
        assert all(map(torch.equal, found.values(), expected.values()))
        assert [*dict(captured.named_buffers())] == [*dict(eager.named_buffers())]
    assert torch.equal(captured.linear.weight.grad, eager.linear.weight.grad)  # type: ignore[arg-type]


def test_a_buffer_that_is_replaced_in_each_call_takes_one_graph() -> None:
    captured = Program(replaces_alone, is_buffer=True, shared=False, closed=True)
    step = graphopt.compile(captured.step)
    before = captured.model.kept
    held = [before]
    for _ in range(4):
        step(None, torch.rand(4, 3))
        held.append(captured.model.kept)
    assert len(step.captures) == 1
    assert len(set(map(id, held))) == 5 and torch.equal(before, torch.full((4, 2), 0.5))


def of_global(held: Any, x: Tensor) -> Tensor:
    return x * held.table["first"]


def of_attribute(held: Any, x: Tensor) -> Tensor:
    return x * held.first


def of_list(held: Any, x: Tensor) -> Tensor:
    return x * held.rows[0]


def of_the_last(held: Any, x: Tensor) -> Tensor:
    result = x * held.first
    held.first = x
    return result


@pytest.mark.parametrize("way", ["tensor", "dictionary", "object"])
@pytest.mark.parametrize("use", [of_global, of_attribute, of_list, of_the_last])
def test_an_argument_that_stands_elsewhere_in_the_first_call(
    use: Callable[[Any, Tensor], Tensor], way: str
) -> None:
    """A fixed batch that is also the first one, or a batch that is kept for the next call."""
    torch.manual_seed(0)
    given = [torch.rand(4, 3) for _ in range(5)]
    model = nn.Linear(3, 1)

    def program() -> tuple[Any, Callable[[Any], Tensor]]:
        held = SimpleNamespace(table={"first": given[0]}, first=given[0], rows=[given[0]])

        def step(batch: Any) -> Tensor:
            x = batch if way == "tensor" else batch["x"] if way == "dictionary" else batch.x
            loss: Tensor = model(use(held, x)).sum()
            loss.backward()
            return loss.detach()

        return held, step

    (held, captured), (other, eager) = program(), program()
    step = graphopt.compile(captured)
    batch: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda x: x,
        "dictionary": lambda x: {"x": x},
        "object": lambda x: SimpleNamespace(x=x),
    }
    for x in [*given, given[0], given[1]]:
        assert torch.equal(step(batch[way](x)), eager(batch[way](x)))
        assert held.first is other.first
    assert len(step.captures) <= 3


def puts_a_tensor(rows: Any, y: Tensor) -> None:
    rows[0] = y.detach()


def moves(rows: Any, y: Tensor) -> None:
    rows[0], rows[2] = y.detach(), rows[0]


def takes_one_out(rows: Any, y: Tensor) -> None:
    rows[2], rows[0] = rows[0], 0.5 * y.detach()


LEFT_IN_A_LIST = [puts_a_tensor, moves, takes_one_out]


@pytest.mark.parametrize("made", [list, deque])
@pytest.mark.parametrize("leave", LEFT_IN_A_LIST)
def test_a_tensor_in_a_list_is_refused_and_one_of_a_dictionary_is_not(
    leave: Callable[[Any, Tensor], None], made: Callable[[list[Any]], Any]
) -> None:
    torch.manual_seed(0)
    model, before = nn.Linear(3, 2), torch.zeros(4, 2)

    def step(x: Tensor, rows: Any) -> Tensor:
        y: Tensor = model(x)
        (y + rows[0]).sum().backward()
        leave(rows, y)
        return y.detach()

    rows, table = made([before, 0.0, None]), {0: before, 1: 0.0, 2: None}
    held, kept = SimpleNamespace(rows=rows), dict(table)
    with pytest.raises(CaptureError, match=r"changes .* an item of a dictionary"):
        graphopt.compile(lambda x: step(x, held.rows))(torch.ones(4, 3))
    assert rows[0] is before and list(rows)[1:] == [0.0, None]
    run = graphopt.compile(lambda x: step(x, table))
    for _ in range(3):
        x = torch.rand(4, 3)
        assert torch.equal(run(x), step(x, kept))
        assert_same(list(table.values()), list(kept.values()), "table")
