"""Lists outside of which a step puts a part, or what it makes of one, into their place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


def run(
    body: Body, compiled: bool, losses: list[Any], calls: int = 5
) -> tuple[list[Any], list[Any], Any]:
    """What each call gives, what it leaves, and how many graphs there are."""
    torch.manual_seed(0)
    s = SimpleNamespace(losses=list(losses), tables={"losses": []}, steps=0, most=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return body(s, loss)

    step: Any = graphopt.compile(train, pipeline="none") if compiled else train
    given, left = [], []
    for call in range(calls):
        if call == 3:
            s.losses = [7.0, 8.0]  # another list, as where an epoch begins
        given.append(step(model, optimizer, torch.randn(4, 3)))
        left.append((list(s.losses), list(s.tables["losses"])))
    return given, left, len(step.captures) if compiled else None


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
    eager, captured = run(body, False, losses), run(body, True, losses)
    assert captured[:2] == eager[:2]
    assert captured[2] == 1


def kept_elsewhere(s: Any, loss: Tensor) -> None:
    s.losses.append(loss.item())
    s.all = s.losses
    s.losses = s.losses[-2:]


def test_the_whole_list_in_another_place_as_well() -> None:
    with pytest.raises(graphopt.CaptureError, match=r"reads s\.losses .* only Python computes"):
        run(kept_elsewhere, True, [])
