"""Lists and queues of tensors in which a step moves items, adds some or takes some away, and by
which it goes: each call finds what the last one has left."""

# ruff: noqa: RUF005  programs add lists as well

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Use = Callable[[Any, Tensor], Tensor]


def weighed(items: Iterable[Tensor]) -> Tensor:
    """A value that goes by the order of the items."""
    return torch.stack([value * (n + 1) for n, value in enumerate(items)]).sum(0)


def oldest_for_newest(held: Any, y: Tensor) -> Tensor:
    result = y + weighed(held.rows)
    held.rows.append(y.detach() * 2)
    del held.rows[0]
    return result


def in_front(held: Any, y: Tensor) -> Tensor:
    held.rows.insert(0, y.detach() * 2)
    held.rows.pop()
    return y + weighed(held.rows)


def turned(held: Any, y: Tensor) -> Tensor:
    held.rows.append(held.rows[0])
    del held.rows[0]
    return y + held.rows[0]


def reversed_each_time(held: Any, y: Tensor) -> Tensor:
    held.rows.reverse()
    return y + weighed(held.rows)


def exchanged(held: Any, y: Tensor) -> Tensor:
    held.rows[0], held.rows[2] = held.rows[2], held.rows[0]
    return y + held.rows[0] * 3 + held.rows[1]


def exchanged_with_another(held: Any, y: Tensor) -> Tensor:
    held.other, held.rows[1] = held.rows[1], held.other
    return y + held.other + weighed(held.rows)


def exchanged_attributes(held: Any, y: Tensor) -> Tensor:
    held.other, held.third = held.third, held.other
    return y + held.other * 2 + held.third


def kept_twice(held: Any, y: Tensor) -> Tensor:
    held.other = held.rows[0]
    held.rows[0] = y.detach() * 0.5
    return y + held.other + weighed(held.rows)


def changed_in_place(held: Any, y: Tensor) -> Tensor:
    held.rows[0].add_(1)
    held.rows.append(held.rows[0])
    del held.rows[0]
    return y + weighed(held.rows)


def filled_and_emptied(held: Any, y: Tensor) -> Tensor:
    held.rows.append(y.detach() * 2)
    if len(held.rows) < 6:
        return y
    result = y + weighed(held.rows)
    held.rows.clear()
    return result


def filled_and_deleted(held: Any, y: Tensor) -> Tensor:
    held.rows.append(y.detach())
    if len(held.rows) >= 5:
        y = y + torch.stack(list(held.rows)).mean(0)
        while held.rows:
            held.rows.pop()
    return y


def set_and_cut(held: Any, y: Tensor) -> Tensor:
    held.rows[1] = y.detach() * 3
    held.rows = type(held.rows)(list(held.rows)[1:] + [y.detach()])
    return y + held.rows[0]


USES = [
    oldest_for_newest,
    in_front,
    turned,
    reversed_each_time,
    exchanged,
    exchanged_with_another,
    exchanged_attributes,
    kept_twice,
    changed_in_place,
    filled_and_emptied,
    filled_and_deleted,
]


def program(use: Use, kind: Callable[[Iterable[Any]], Any]) -> tuple[Any, Callable[[], list[Any]]]:
    """A step, and what it has left; in which places one tensor stands is a part of that."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = kind(torch.full((4, 2), 0.1 * number) for number in range(3))
    held = SimpleNamespace(rows=rows, other=torch.full((4, 2), 0.7), third=torch.ones(4, 2))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = use(held, model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def left() -> list[Any]:
        tensors = [*held.rows, held.other, held.third]
        same = [next(n for n, a in enumerate(tensors) if a is b) for b in tensors]
        return [type(held.rows), same, *(t.tolist() for t in (*model.parameters(), *tensors))]

    return step, left


def compared(make: Callable[[], tuple[Any, Callable[[], list[Any]]]], calls: int = 8) -> Any:
    """Run a program both ways. Returns the compiled step."""
    (captured, left), (eager, expected) = make(), make()
    step = graphopt.compile(captured)
    for _ in range(calls):
        x = torch.rand(4, 3)
        assert torch.equal(torch.as_tensor(step(x)), torch.as_tensor(eager(x)))
        assert left() == expected()
    return step


def why_refused(make: Callable[[], tuple[Any, Callable[[], list[Any]]]]) -> str:
    """What is said where a program is not captured; else it does what eager code does."""
    try:
        compared(make, calls=4)
    except CaptureError as error:
        return str(error)
    return "held.rows"


@pytest.mark.parametrize("kind", [list, deque])
@pytest.mark.parametrize("use", USES)
def test_as_in_eager_code(use: Use, kind: Any) -> None:
    step = compared(lambda: program(use, kind))
    if not use.__name__.startswith("filled"):
        assert len(step.captures) == 1


def test_a_queue_with_room_for_so_many() -> None:
    def use(held: Any, y: Tensor) -> Tensor:
        held.rows.append(y.detach())
        return y + weighed(held.rows)

    step = compared(lambda: program(use, lambda rows: deque(rows, maxlen=5)))
    assert len(step.captures) == 3  # for three, four and five of them


def test_an_item_is_set_before_the_list_is_cut() -> None:
    compared(lambda: program(set_and_cut, list))


NUMBERS: dict[str, Callable[[Any, float], Any]] = {}


def of_numbers(change: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    NUMBERS[change.__name__] = change
    return change


@of_numbers
def item_then_rest(held: Any, loss: float) -> None:
    held.rows[1] = loss
    held.rows = held.rows[1:] + [0.5]


@of_numbers
def last_then_rest(held: Any, loss: float) -> None:
    held.rows[-1] += loss
    held.rows = held.rows[1:] + [0.5]


@of_numbers
def by_another_name(held: Any, loss: float) -> None:
    rows = held.rows
    rows[1] = loss
    held.rows = [1.0] + held.rows[:-1]


@of_numbers
def rest_then_item(held: Any, loss: float) -> float:
    held.rows = held.rows[1:] + [loss]
    total = sum(held.rows)
    held.rows[0] = 9.0
    return total + held.rows[0] * sum(held.rows)


@of_numbers
def rest_then_two_items(held: Any, loss: float) -> None:
    held.rows = held.rows[1:] + [loss]
    held.rows[0] = 9.0
    held.rows[1] = held.rows[0] + 1


@of_numbers
def item_of_copy(held: Any, loss: float) -> None:
    copy = held.rows[:]
    held.rows[1] = loss
    held.rows = copy[1:] + [0.5]


def first_of_others(held: Any, loss: float) -> int:
    held.rows.pop()
    held.rows.insert(0, 9.0)
    held.rows[0] = 2.0
    return len(held.rows)


def cut_by_a_slice(held: Any, loss: float) -> int:
    held.rows.append(2.0)
    held.rows[0:1] = []
    return len(held.rows)


@pytest.mark.parametrize("change", [first_of_others, cut_by_a_slice])
def test_what_is_not_followed_is_refused(change: Callable[[Any, float], int]) -> None:
    held = SimpleNamespace(rows=[1.0, 2.0, 3.0])
    step = graphopt.compile(lambda x: x.sum() * change(held, 0.0))
    with pytest.raises(CaptureError, match=r"held\.rows"):
        step(torch.ones(2))


def test_the_hint_for_a_tensor_in_two_places_works() -> None:
    def queue(rows: Iterable[Any]) -> Any:
        return deque(rows, maxlen=4)

    def repeated(held: Any, y: Tensor) -> Tensor:
        held.rows[0], held.rows[1] = held.rows[1], held.rows[0]
        result = y + weighed(held.rows)
        held.rows.append(y.detach())
        held.rows.append(held.rows[-1])
        return result

    def copied(held: Any, y: Tensor) -> Tensor:
        held.rows[0], held.rows[1] = held.rows[1], held.rows[0]
        result = y + weighed(held.rows)
        held.rows.append(y.detach())
        held.rows.append(held.rows[-1].clone())
        return result

    compared(lambda: program(copied, queue))
    step = graphopt.compile(program(repeated, queue)[0])

    def calls() -> None:
        for _ in range(4):
            step(torch.rand(4, 3))

    with pytest.raises(CaptureError, match="that it finds in another place") as caught:
        calls()
    assert "clone()" in str(caught.value)


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_numbers_as_in_eager_code(change: Callable[[Any, float], Any]) -> None:
    def make() -> tuple[Any, Callable[[], list[Any]]]:
        held = SimpleNamespace(rows=[1.0, 2.0, 3.0])

        def step(x: Tensor) -> Any:
            loss = x.sum().item()
            return change(held, loss) or loss

        return step, lambda: list(held.rows)

    compared(make, calls=4)


@pytest.mark.parametrize("ask", [sum, lambda rows: rows[-1], max])
def test_a_sum_behind_an_item_that_is_set(ask: Callable[[list[float]], float]) -> None:
    """What was there before the call is not what the list then has."""

    def make() -> tuple[Any, Callable[[], list[Any]]]:
        held = SimpleNamespace(rows=[1.0, 2.0, 3.0])

        def step(x: Tensor) -> Any:
            held.rows[0] = x.sum().item() * 2
            held.rows.append(4.0)
            return ask(held.rows)

        return step, lambda: list(held.rows)

    assert "held.rows" in why_refused(make)
