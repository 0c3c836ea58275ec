"""Steps that catch exceptions: what the trace itself raises is no exception of the step's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Loop = Callable[[Any, Tensor, Tensor], None]


def loss_of(kept: Any, x: Tensor, boxes: Tensor) -> Tensor:
    found = boxes[boxes[:, 0] != -1]
    if found.shape[0] == 0:
        return kept.model(x).mean()
    return (kept.model(x).mean(0) - found).abs().sum() / found.shape[0]


def update(kept: Any, loss: Tensor) -> None:
    kept.optimizer.zero_grad()
    loss.backward()
    kept.optimizer.step()
    kept.losses.append(loss.item())


def any_error(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        update(kept, loss_of(kept, x, boxes))
    except:  # noqa: E722
        kept.failed += 1


def prints_it(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = loss_of(kept, x, boxes)
        update(kept, loss)
    except Exception as error:
        print(error)
        return


def out_of_memory(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = loss_of(kept, x, boxes)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise ValueError("no memory") from error
        return
    update(kept, loss)


def its_own(kept: Any, x: Tensor, boxes: Tensor) -> None:
    try:
        loss = kept.model(x).pow(2).mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("not finite")
        update(kept, loss)
    except FloatingPointError:
        kept.failed += 1


def says_its_own(kept: Any, x: Tensor, boxes: Tensor) -> None:
    loss = kept.model(x).pow(2).mean()
    try:
        if (boxes == -1).sum() > 2:
            raise RuntimeError("too many", 3)
        if loss < 0.5:
            raise ValueError("low")
    except (RuntimeError, ValueError) as error:
        print(error, [str(error)], type(error).__name__)
        logging.getLogger("caught").warning("%s", error)
    update(kept, loss)


def in_a_function(kept: Any, x: Tensor, boxes: Tensor) -> None:
    def tried() -> Tensor | None:
        try:
            return loss_of(kept, x, boxes)
        except Exception:
            return None

    loss = tried()
    update(kept, kept.model(x).sum() if loss is None else loss)


def trained(loop: Loop, captured: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace(model=model, optimizer=optimizer, losses=[], failed=0)

    def step(x: Tensor, boxes: Tensor) -> None:
        loop(kept, x, boxes)

    taken = graphopt.compile(step) if captured else step
    for index in range(5):
        boxes = torch.rand(3, 2)
        boxes[index % 3 :] = -1
        x = torch.randn(4, 3)
        taken(x / 0 if loop is its_own and index == 3 else x, boxes)
    return [kept.losses, kept.failed, *(each.tolist() for each in model.parameters())]


@pytest.mark.parametrize(
    "loop", [any_error, prints_it, out_of_memory, its_own, says_its_own, in_a_function]
)
def test_the_same_as_eager(
    loop: Loop, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for captured in (False, True):
        caplog.clear()
        left = trained(loop, captured)
        logged = [each.getMessage() for each in caplog.records if each.name == "caught"]
        found.append((left, capsys.readouterr().out, logged))
    assert found[0] == found[1]


def test_a_refusal_is_not_caught() -> None:
    model = nn.Linear(2, 2)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        try:
            values = sorted([loss], key=float)
        except Exception:
            values = [loss]
        values[0].backward()
        return loss

    with pytest.raises(CaptureError):
        step(torch.ones(2, 2))
