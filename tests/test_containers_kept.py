"""Lists and dictionaries that a step returns or keeps: those of the call, of the program, or one
that it makes, in all places where it puts them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt

Kept = Callable[[Any, dict[str, Any], Any, Tensor], Any]


def batch_returned(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    b["loss"] = loss.detach()
    return b, b["list"], o


def batch_kept(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    s.last = b
    s.model.kept = {"b": b, "o": o}
    return loss


def lists_moved(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    b["again"], o.list, b["list"] = b["list"], b["list"], o.list
    return loss


def program_s_returned(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    return s.rows, {"table": s.table}


def one_made(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    made = [loss.detach()]
    s.last, b["made"], s.model.kept, o.made = made, [made], (made, 1), made
    return {"made": made, "twice": made}


def one_made_of_constants(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    made: dict[str, Any] = {"a": 1}
    s.model.kept = [made]
    b["made"] = made
    return made


def tables_of_an_object_kept(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    s.model.kept, s.last = o.table, o.table
    return loss


def list_of_what_was_there(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    s.last = s.model.kept = list(o.list)
    return loss


def log_of_the_step(s: Any, b: dict[str, Any], o: Any, loss: Tensor) -> Any:
    s.last = {"loss": loss.item()}
    return s.last


def numbered(values: Any) -> Any:
    """All that is there, where each list, dictionary and object has the number of its place."""
    known: dict[int, int] = {}

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, tuple):
            return [form(each) for each in value]
        if not isinstance(value, (list, dict, SimpleNamespace, nn.Module)):
            return value
        if id(value) in known:
            return f"number {known[id(value)]}"
        known[id(value)] = len(known)
        if isinstance(value, nn.Module):
            return form([*value.parameters(), getattr(value, "kept", None)])
        items = value if isinstance(value, (list, dict)) else vars(value)
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        return [(key, form(each)) for key, each in pairs]

    return form(values)


def run(keep: Kept, compiled: bool, anew: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    s = SimpleNamespace(model=model, rows=[], table={"k": [1, 2]}, last=None)

    def step(b: dict[str, Any], o: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(b["x"]) * o.x).square().mean()
        loss.backward()
        optimizer.step()
        return keep(s, b, o, loss)

    called = graphopt.compile(step, pipeline="none") if compiled else step
    found = []
    for number in range(4):
        if anew or not number:
            b = {"x": torch.randn(2, 3), "list": [torch.randn(2)]}
            o = SimpleNamespace(x=torch.randn(3), list=[torch.randn(3)], table={"n": number})
        returned = called(b, o)
        found.append(numbered((returned, b, o, s)))
        s.rows.append(number)
    return found


KEEPS = [
    *(batch_returned, batch_kept, lists_moved, program_s_returned),
    *(one_made, one_made_of_constants, log_of_the_step, tables_of_an_object_kept),
    list_of_what_was_there,
]


@pytest.mark.parametrize("keep", KEEPS)
def test_each_call_has_those_of_eager_code(keep: Kept) -> None:
    assert run(keep, True, anew=True) == run(keep, False, anew=True)


@pytest.mark.parametrize("keep", [keep for keep in KEEPS if keep is not lists_moved])
def test_the_same_batch_in_each_call(keep: Kept) -> None:
    assert run(keep, True, anew=False) == run(keep, False, anew=False)


def test_a_container_that_contains_itself_is_refused() -> None:
    b: dict[str, Any] = {"x": torch.ones(3)}
    b["list"] = [b]
    with pytest.raises(graphopt.CaptureError, match="contains itself"):
        graphopt.compile(lambda b: b["x"] * 2)(b)
