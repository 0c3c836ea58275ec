"""Lists and dictionaries in whose place a program puts new ones between two calls, as in each
epoch: the calls change those that are there then, and one graph is enough where they only do that.
"""

from __future__ import annotations

import io
import json
import statistics
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt

Effect = Callable[[Any, Tensor], Any]


def appends(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())


def appends_to_two(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    kept.others.append("in between")
    kept.rows.append(0.5)


def keeps_tensors(kept: Any, loss: Tensor) -> None:
    kept.queue.append(loss.detach())


def fills(kept: Any, loss: Tensor) -> None:
    kept.table["loss"] = loss.item()
    kept.table["text"] = f"{loss.item():.2f}"


def appends_within(kept: Any, loss: Tensor) -> None:
    kept.table["rows"].append(loss.item())


def computes_of_the_last(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    kept.table["rows"].append(loss.item())
    print(f"{np.mean(kept.rows):.3f} {kept.rows[-2:]}")
    return np.mean(kept.rows[-3:]), statistics.mean(kept.table["rows"])


def decides_by_the_last(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    return "high" if np.mean(kept.rows) > loss.item() else "low"


def counts(kept: Any, loss: Tensor) -> None:
    kept.table["count"] = kept.table.get("count", 0) + 1


def asks_length(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    return len(kept.rows), sum(kept.rows)


def keeps_the_list(kept: Any, loss: Tensor) -> None:
    rows = kept.rows
    rows.append(loss.item())
    kept.others.append(rows)


def calls_back(kept: Any, loss: Tensor) -> None:
    graphopt.callback(kept.rows.append, loss.item())


def calls_back_by_a_function(kept: Any, loss: Tensor) -> None:
    rows = kept.rows
    graphopt.callback(lambda value: rows.append(value), loss.item())


def shows(kept: Any, loss: Tensor) -> None:
    print(kept.rows, kept.table, "and", loss.item(), (kept.queue, 1))


def writes_text(kept: Any, loss: Tensor) -> Any:
    text = json.dumps({"table": kept.table, "loss": loss.item()})
    return text, "%s %.2f" % (kept.table, loss.item()), "{} {}".format(kept.table, loss.item())  # noqa: UP031, UP032


FOLLOWED = [appends, appends_to_two, keeps_tensors, fills, appends_within, computes_of_the_last]
OTHERS = [
    decides_by_the_last,
    counts,
    asks_length,
    keeps_the_list,
    calls_back,
    calls_back_by_a_function,
    shows,
    writes_text,
]


def begin_anew(kept: Any, number: int) -> None:
    kept.rows, kept.others, kept.queue = [], [], deque(maxlen=2)
    kept.table = {"rows": [], "number": number}


def begin_as_one(kept: Any, number: int) -> None:
    """What was two lists is one, or two again."""
    begin_anew(kept, number)
    if number % 2:
        kept.others = kept.rows


def exchange_the_outer(kept: Any, number: int) -> None:
    kept.table = dict(kept.table) if number % 2 else {"rows": [], "number": number}


def run(effect: Effect, begin: Callable[[Any, int], None], compiled: bool) -> tuple[Any, int]:
    """What each call says, gives and leaves, in old containers as well, and how many graphs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace()
    begin_anew(kept, 0)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), effect(kept, loss)

    used: Any = graphopt.compile(step) if compiled else step
    found: list[Any] = []
    before: list[Any] = []
    said = io.StringIO()
    for number, x in enumerate(torch.randn(9, 5, 4)):
        if number % 2 == 0:
            before.append(vars(kept).copy())
            begin(kept, number // 2)
        with redirect_stdout(said):
            result = used(x)
        found.append(f"{result} {vars(kept)} {before} {said.getvalue()}")
    return found, len(used.captures) if compiled else 0


@pytest.mark.parametrize("begin", [begin_anew, begin_as_one, exchange_the_outer])
@pytest.mark.parametrize("effect", [*FOLLOWED, *OTHERS])
def test_each_call_changes_what_is_there(effect: Effect, begin: Callable[[Any, int], None]) -> None:
    if effect is keeps_the_list and begin is begin_as_one:
        pytest.skip("a list that contains itself")
    expected, _ = run(effect, begin, False)
    found, captures = run(effect, begin, True)
    assert found == expected
    if effect in FOLLOWED and begin is not begin_as_one:
        assert captures == 1
