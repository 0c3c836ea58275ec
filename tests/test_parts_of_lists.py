"""Lists outside into whose place a step puts a part, or what it makes of one; and their items."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import graphopt

Body = Callable[[Any, Tensor], Any]


def appended(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = s.losses[-3:]


def constant(s: Any, loss: Tensor) -> None:
    s.losses.append(0.25)
    s.losses = s.losses[-s.most :]


def counted(s: Any, loss: Tensor) -> None:
    s.steps += 1
    s.losses.append(s.steps)
    s.losses = s.losses[-3:]


def of_tensors(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.detach())
    s.losses = s.losses[-3:]


def in_front(s: Any, loss: Tensor) -> None:
    s.losses.insert(0, loss.item())
    s.losses = s.losses[:3]


def in_one_line(s: Any, loss: Tensor) -> None:
    s.losses = s.losses[-2:] + [loss.item()]  # noqa: RUF005


def tensors_in_one_line(s: Any, loss: Tensor) -> None:
    s.losses = [loss.detach()] + s.losses[:2]  # noqa: RUF005


def constants_in_one_line(s: Any, loss: Tensor) -> None:
    s.losses = [0.25] + s.losses[:1]  # noqa: RUF005


def averaged(s: Any, loss: Tensor) -> float:
    s.losses += [loss.item()]
    s.losses = s.losses[-3:]
    return sum(s.losses) / len(s.losses)


def by_another_name(s: Any, loss: Tensor) -> float:
    s.losses.append(loss.item())
    known = s.losses
    s.losses = known[-2:]
    return sum(s.losses)


def twice(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = s.losses[-2:]
    s.losses = s.losses[-1:]


def copied(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = list(s.losses[-3:])


def sorted_first(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = sorted(s.losses)[:3]


def in_a_dictionary(s: Any, loss: Tensor) -> None:
    s.tables["losses"].append((s.steps, loss.item()))
    s.tables["losses"] = s.tables["losses"][-2:]


def stepping(body: Body, compiled: bool) -> tuple[Any, Any]:
    """What a step works on outside, and the step: a call without arguments."""
    torch.manual_seed(0)
    s = SimpleNamespace(losses=[], tables={"losses": []}, steps=0, most=2, array=numpy.zeros(3))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return body(s, loss)

    step: Any = graphopt.compile(train, pipeline="none") if compiled else train
    s.captures = lambda: len(step.captures)
    return s, lambda: step(model, optimizer, torch.randn(4, 3))


def run(body: Body, compiled: bool, losses: list[Any]) -> tuple[Any, list[Any]]:
    """What is outside in the end; what each of five calls gives, and what it leaves."""
    s, step = stepping(body, compiled)
    s.losses = list(losses)
    found = []
    for call in range(5):
        if call == 3:
            s.losses = [7.0, 8.0]  # another list, as where an epoch begins
        found.append((step(), list(s.losses), list(s.tables["losses"])))
    return s, found


@pytest.mark.parametrize("losses", [[], [1.0, 2.0, 3.0, 4.0]], ids=["empty", "full"])
@pytest.mark.parametrize(
    "body",
    [
        *(appended, constant, counted, of_tensors, in_front, in_one_line, tensors_in_one_line),
        *(constants_in_one_line, averaged, by_another_name, twice, copied, sorted_first),
        in_a_dictionary,
    ],
)
def test_each_call_makes_it_of_the_list_that_it_finds(body: Body, losses: list[float]) -> None:
    (_, expected), (s, found) = run(body, False, losses), run(body, True, losses)
    assert found == expected
    assert s.captures() == 1


def kept_elsewhere(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.all = s.losses
    s.losses = s.losses[-2:]


def test_the_whole_list_in_another_place_as_well() -> None:
    with pytest.raises(graphopt.CaptureError, match=r"reads s\.losses .* only Python computes"):
        run(kept_elsewhere, True, [])


def in_two_places(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses = s.losses[-2:]
    s.tables["losses"] = s.losses


def returned_as_well(s: Any, loss: Tensor) -> list[float]:
    s.losses.append(loss.item())
    s.losses = sorted(s.losses)
    return s.losses  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [False, True])
def test_one_list_in_two_places_is_one(compiled: bool) -> None:
    s, step = stepping(in_two_places, compiled)
    for _ in range(3):
        step()
        assert s.losses is s.tables["losses"]
    s, step = stepping(returned_as_well, compiled)
    for _ in range(3):
        assert step() is s.losses


def last_replaced(s: Any, loss: Tensor) -> None:
    s.losses[-1] = loss.item()


def second_replaced(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.losses[1] = 5.0


def last_taken(s: Any, loss: Tensor) -> tuple[int, Any]:
    before = len(s.losses)
    return before, s.losses.pop() if s.losses else None


def cut_behind_a_look(s: Any, loss: Tensor) -> float:
    last = s.losses[-1]
    del s.losses[:-2]
    return float(last)


def cut_behind_a_maximum(s: Any, loss: Tensor) -> float:
    most = max(s.losses, default=0.0)
    del s.losses[:-2]
    return float(most)


@pytest.mark.parametrize(
    "body", [last_replaced, second_replaced, last_taken, cut_behind_a_look, cut_behind_a_maximum]
)
def test_items_of_a_list_that_the_program_changes_between_calls(body: Body) -> None:
    found = []
    for compiled in (False, True):
        s, step = stepping(body, compiled)
        s.losses = [1.0, 2.0]
        left = []
        for call in range(5):
            left.append((step(), list(s.losses)))
            if call != 2:
                s.losses.append(float(call))
        found.append(left)
    assert found[0] == found[1]


def first_replaced_behind_an_insert(s: Any, loss: Tensor) -> None:
    s.losses.insert(0, 3.0)
    s.losses[0] = 4.0


def test_an_item_of_a_list_whose_items_the_step_has_moved_is_refused() -> None:
    _, step = stepping(first_replaced_behind_an_insert, True)
    with pytest.raises(graphopt.CaptureError, match=r"it changes s\.losses in a way"):
        step()


def test_lists_of_a_module_that_a_step_swaps() -> None:
    model = nn.Linear(3, 1)
    model.now, model.before = [1.0], [2.0]  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile(pipeline="none")
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        model.now, model.before = model.before, model.now
        return loss

    for now in ([2.0], [1.0], [2.0]):
        step(model, optimizer, torch.randn(4, 3))
        assert model.now == now


def same_item(s: Any, loss: Tensor) -> None:
    s.array[0] = 2.0
    s.array[0] = loss.item()


def all_of_it(s: Any, loss: Tensor) -> None:
    s.array[1] = 2.0
    s.array *= loss.item()


def other_items(s: Any, loss: Tensor) -> None:
    s.array[0] = 2.0
    s.array[1] = loss.item()
    s.array[2] = 3.0


@pytest.mark.parametrize("body", [same_item, all_of_it])
def test_an_array_at_constants_first(body: Body) -> None:
    _, step = stepping(body, True)
    with pytest.raises(graphopt.CaptureError, match=r"reads or changes s\.array and then"):
        step()


def test_an_array_at_other_items() -> None:
    found = []
    for compiled in (False, True):
        s, step = stepping(other_items, compiled)
        step()
        step()
        found.append(s.array.tolist())
    assert found[0] == found[1]
