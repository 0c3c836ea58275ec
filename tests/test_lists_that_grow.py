"""Lists among the arguments of a step that each call makes longer: one graph for all lengths."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

CALLS = 7


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def appends(storer: Any, loss: Tensor) -> None:
    storer["loss"].append(loss.item())


def appends_by_name(storer: Any, loss: Tensor) -> None:
    for name, value in {"loss": loss, "twice": loss * 2}.items():
        storer.setdefault(name, []).append(value.item())


def extends(storer: Any, loss: Tensor) -> None:
    storer["loss"] += [loss.item(), 2.0]


def keeps_tensors(storer: Any, loss: Tensor) -> None:
    storer["loss"].append(loss.detach())


def shows_length(storer: Any, loss: Tensor) -> int:
    storer["loss"].append(loss.item())
    return len(storer["loss"])


def appends_within(storer: Any, loss: Tensor) -> None:
    storer.value["loss"].append(loss.detach())


def appends_to_itself(storer: Any, loss: Tensor) -> None:
    storer.append(loss.item())


def a_list() -> dict[str, list[Any]]:
    return {"loss": []}


WAYS: list[tuple[Callable[[Any, Tensor], Any], Callable[[], Any], int]] = [
    (appends, a_list, 2),
    (appends, lambda: defaultdict(list), 3),
    (appends, lambda: OrderedDict(loss=[]), 2),
    (appends_by_name, dict, 3),
    (extends, a_list, 2),
    (keeps_tensors, a_list, 3),
    (shows_length, a_list, 2),
    (appends_within, lambda: Holder({"loss": []}), 3),
    (appends_to_itself, list, 2),
]


def _items(storer: Any) -> str:
    return str(storer.value if isinstance(storer, Holder) else storer)


def _left(
    puts: Callable[[Any, Tensor], Any], make: Callable[[], Any], compiled: bool, renewed: int
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, storer: Any) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return puts(storer, loss)

    run = graphopt.compile(step) if compiled else step
    storer, left = make(), []
    for number in range(CALLS):
        if number % renewed == 0:
            storer = make()
        left.append([str(run(torch.rand(4, 3), storer)), _items(storer)])
    left.append([p.tolist() for p in model.parameters()])
    return left, len(run.captures) if isinstance(run, graphopt.TrainStep) else 0


@pytest.mark.parametrize("renewed", [CALLS, 3])
@pytest.mark.parametrize(("puts", "make", "graphs"), WAYS)
def test_one_graph_for_all_lengths(puts: Any, make: Any, graphs: int, renewed: int) -> None:
    left, captured = _left(puts, make, True, renewed)
    assert left == _left(puts, make, False, renewed)[0]
    assert captured <= graphs


def test_a_list_that_a_call_makes_itself_is_part_of_what_it_gives() -> None:
    model = nn.Linear(3, 2)

    def step(x: Tensor, outputs: list[Tensor]) -> None:
        outputs.append(model(x))

    run = graphopt.compile(step)
    for _ in range(3):
        outputs: list[Tensor] = []
        run(x := torch.rand(4, 3), outputs)
        assert torch.equal(outputs[0], model(x)) and len(outputs) == 1
    assert len(run.captures) == 1


def test_lists_of_other_lengths_are_remembered_until_reset() -> None:
    def step(x: Tensor, rows: list[float]) -> None:
        rows.append(x.sum().item())

    run, rows = graphopt.compile(step), list[float]()
    for _ in range(3):
        run(torch.ones(3), rows)
    run.reset()
    run(torch.ones(3), rows)
    run(torch.ones(3), rows)
    assert rows == [3.0] * 5
