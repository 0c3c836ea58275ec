"""Lists and dictionaries among the arguments that a step gets to in another way as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


def appends(a: Any, b: Any) -> Any:
    a.append(3.0)
    return len(b), sum(b)


def puts(a: Any, b: Any) -> Any:
    a[0] = 5.0
    return b[0]


def puts_into_the_other(a: Any, b: Any) -> Any:
    b[0] = 7.0
    return a[0]


def adds_a_key(a: Any, b: Any) -> Any:
    a["b"] = 2.0
    return sorted(b)


def puts_within(a: Any, b: Any) -> Any:
    b["rows"].append(2.0)
    return len(a)


def reads(a: Any, b: Any) -> Any:
    return a[0] + b[0]


def step_of(what: Callable[[Any, Any], Any], other: Callable[[Any], Any]) -> Callable[..., Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, *given: Any) -> Any:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return what(given[0], other(given))

    return step


@pytest.mark.parametrize("what", [appends, puts, puts_into_the_other, adds_a_key, puts_within])
@pytest.mark.parametrize("outside", [False, True])
def test_a_change_that_is_seen_in_another_way_is_refused(what: Any, outside: bool) -> None:
    rows, table = [1.0, 2.0], {"a": 1.0}
    given: Any = table if what is adds_a_key else rows
    second = {"rows": rows} if what is puts_within else given
    other = (lambda _: second) if outside else (lambda arguments: arguments[1])
    step = graphopt.compile(step_of(what, other))
    with pytest.raises(graphopt.CaptureError, match=r"among its arguments that (it finds|stands)"):
        step(torch.ones(1, 3), given, *([] if outside else [second]))
    assert rows == [1.0, 2.0] and table == {"a": 1.0}


@pytest.mark.parametrize("outside", [False, True])
def test_what_is_only_read_may_be_there_twice(outside: bool) -> None:
    rows = [1.0, 2.0]
    other = (lambda _: rows) if outside else (lambda arguments: arguments[1])
    step = graphopt.compile(step_of(reads, other))
    for number in range(3):
        rows[0] = float(number)
        assert step(torch.ones(1, 3), rows, *([] if outside else [rows])) == 2.0 * number


def test_a_later_call_may_give_one_list_twice() -> None:
    step = graphopt.compile(step_of(appends, lambda arguments: arguments[1]))
    first, second = [1.0], [2.0]
    assert step(torch.ones(1, 3), first, second) == (1, 2.0)
    assert step(torch.ones(1, 3), first, second) == (1, 2.0)
    assert step(torch.ones(1, 3), first, first) == (4, 10.0)
    assert first == [1.0, 3.0, 3.0, 3.0]
