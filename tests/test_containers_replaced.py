"""Lists and dictionaries among the arguments that a step changes and then replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Step = Callable[[Any, nn.Module, Tensor], Any]


def shortened(state: Any, model: nn.Module, x: Tensor) -> None:
    state.losses.append(model(x).detach())
    state.losses = state.losses[-3:]


def shortened_then_changed(state: Any, model: nn.Module, x: Tensor) -> None:
    state.losses.append(x)
    state.losses = state.losses[-2:]
    state.losses[0] = model(x).detach() * 2


def added_to(state: Any, model: nn.Module, x: Tensor) -> None:
    state.losses.append(x)
    state.losses = [*state.losses[1:], model(x).detach()]
    state.losses.append(state.best)


def table_begun_anew(state: Any, model: nn.Module, x: Tensor) -> None:
    state.table["last"] = x
    state.table = {"first": state.table["last"], "second": model(x).detach()}
    state.table["last"] = state.best


def swapped(state: Any, model: nn.Module, x: Tensor) -> None:
    state.losses.append(x)
    state.losses, state.others = state.others, state.losses


def put_elsewhere(state: Any, model: nn.Module, x: Tensor) -> None:
    state.table["losses"] = state.losses


def put_into_a_new_one(state: Any, model: nn.Module, x: Tensor) -> None:
    state.table = {"all": [state.others, model(x).detach()]}


def plain(state: Any) -> Any:
    return {name: shown(value) for name, value in vars(state).items()}


def shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return [(key, shown(each)) for key, each in value.items()]
    return [shown(each) for each in value]


def run(step: Step, compiled: bool, as_table: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    fields = {
        "losses": [torch.randn(2)],
        "others": [torch.randn(2), torch.randn(2)],
        "table": {"last": torch.randn(2), "list": [torch.randn(2)]},
        "best": torch.randn(2),
    }
    state = SimpleNamespace(**fields)

    def given(state: Any, model: nn.Module, x: Tensor) -> Tensor:
        if as_table:
            state, table = SimpleNamespace(**state), state
            step(state, model, x)
            table.update(vars(state))
        else:
            step(state, model, x)
        y: Tensor = model(x).detach()
        return y

    called: Any = graphopt.compile(given) if compiled else given
    found: list[Any] = []
    for _ in range(6):
        lists = [state.losses, state.others, state.table]
        called(vars(state) if as_table else state, model, torch.randn(2))
        found.append((plain(state), shown(lists)))
    return found


@pytest.mark.parametrize("as_table", [False, True], ids=["object", "dictionary"])
@pytest.mark.parametrize(
    "step",
    [
        *(shortened, shortened_then_changed, added_to, table_begun_anew),
        *(swapped, put_elsewhere, put_into_a_new_one),
    ],
)
def test_every_call_is_eager_s(step: Step, as_table: bool) -> None:
    assert run(step, True, as_table) == run(step, False, as_table)
