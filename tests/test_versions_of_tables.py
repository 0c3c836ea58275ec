"""Versions of dictionaries stand for what is in them: each kind of change is noticed, also in those
that change again and again, and hooks of tensors are noticed beside them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt.guards.unchanged import StateSnapshot


class Owner:
    """A class that has an attribute, as its objects do."""

    kind: Any = "class"

    def __init__(self) -> None:
        self.value: Any = "own"
        self.beside: Any = 0


Change = Callable[[Any], Any]

OF_TABLES: dict[str, Change] = {
    "item": lambda table: table.__setitem__("value", object()),
    "equal": lambda table: table.__setitem__("flag", 1),
    "added": lambda table: table.__setitem__("new", 1),
    "default": lambda table: table.setdefault("new", 1),
    "updated": lambda table: table.update(value=2),
    "joined": lambda table: table.__ior__({"value": 2}),
    "deleted": lambda table: table.__delitem__("value"),
    "popped": lambda table: table.pop("value"),
    "last popped": lambda table: table.popitem(),
    "cleared": lambda table: table.clear(),
}


@pytest.mark.parametrize("earlier", [0, 1, 3, 6])
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
@pytest.mark.parametrize("change", OF_TABLES.values(), ids=OF_TABLES)
def test_changes_of_a_table(change: Change, kind: Callable[..., Any], earlier: int) -> None:
    whole, single = StateSnapshot(), StateSnapshot()
    table = kind({"value": "text", "beside": 0, "flag": True})
    whole.has_items(table)
    single.has(table, "value", table["value"])
    single.has(table, "flag", True)
    single.has_key(table, "new", False)
    single.has_size(table)
    before = dict(table)
    for number in range(earlier):
        table["beside"] = object()
        assert single.holds()
        assert whole.holds() is (number < 0)
        table["beside"] = before["beside"]
        assert whole.holds()
    assert single.holds() and whole.holds()
    change(table)
    assert not whole.holds()
    assert not single.holds()
    table.clear()
    table.update(before)
    assert single.holds() and whole.holds()


class WithoutTruth(list[int]):
    """A container that refuses to be asked whether it is empty."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


def test_containers_are_not_asked_for_their_truth() -> None:
    held, snapshot = WithoutTruth([1]), StateSnapshot()
    snapshot.has_key(held, 2, False)
    snapshot.has_size(held)
    assert snapshot.holds() and snapshot.holds()
    held[0] = 2
    assert not snapshot.holds()


def test_an_empty_table_that_takes_over_another_one() -> None:
    table: dict[str, int] = {}
    snapshot = StateSnapshot()
    snapshot.has_key(table, "value", False)
    assert snapshot.holds() and snapshot.holds()
    table.update({"value": 1})  # copies the other one's memory
    assert not snapshot.holds()


@pytest.mark.parametrize("emptied", [1, 2, 6])
def test_a_table_emptied_that_takes_over_another_one(emptied: int) -> None:
    table = {"beside": 1}
    snapshot = StateSnapshot()
    snapshot.has_key(table, "value", False)
    for _ in range(emptied):
        assert snapshot.holds()
        table.clear()
        assert snapshot.holds() and snapshot.holds()
        table |= {"beside": 1}
    table.clear()
    assert snapshot.holds() and snapshot.holds()
    table |= {"value": 1}
    assert not snapshot.holds()


def set_value(owner: Owner, value: object) -> None:
    owner.value = value


@pytest.mark.parametrize("looked_at_first", [False, True])
def test_an_attribute_set_in_a_hot_loop(looked_at_first: bool) -> None:
    for _ in range(100):  # CPython specializes the instruction
        owner = Owner()
        if looked_at_first:
            vars(owner)
        set_value(owner, "own")
        snapshot = StateSnapshot()
        snapshot.has(vars(owner), "value", "own")
        assert snapshot.holds() and snapshot.holds()
        set_value(owner, "other")
        assert not snapshot.holds()


OF_OWNERS: dict[str, Change] = {
    "attribute": lambda owner: setattr(owner, "value", 2),
    "attribute deleted": lambda owner: delattr(owner, "value"),
    "attribute before that of the class": lambda owner: setattr(owner, "kind", 2),
    "attribute of the class": lambda owner: setattr(Owner, "kind", 2),
    "attribute of the class deleted": lambda owner: delattr(Owner, "kind"),
    "new attribute of the class": lambda owner: setattr(Owner, "value", 2),
}


@pytest.mark.parametrize("earlier", [0, 2, 6])
@pytest.mark.parametrize("change", OF_OWNERS.values(), ids=OF_OWNERS)
def test_changes_of_an_object(
    change: Change, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner, "kind", "class")
    monkeypatch.setattr(Owner, "value", None, raising=False)
    monkeypatch.delattr(Owner, "value")  # both are put back afterwards
    owner, snapshot = Owner(), StateSnapshot()
    snapshot.has(vars(owner), "value", owner.value)
    snapshot.has_key(vars(owner), "kind", False)
    snapshot.has(vars(Owner), "kind", "class")
    snapshot.has_key(vars(Owner), "value", False)
    for _ in range(earlier):
        owner.beside += 1
        assert snapshot.holds()
    assert snapshot.holds()
    change(owner)
    assert not snapshot.holds()


OF_TENSORS: dict[str, Change] = {
    "hook": lambda tensor: tensor.register_hook(lambda gradient: gradient),
    "hook on the sum": lambda tensor: tensor.register_post_accumulate_grad_hook(print),
    "requires_grad": lambda tensor: tensor.requires_grad_(False),
    "shape": lambda tensor: setattr(tensor, "data", torch.ones(3)),
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("had_hook", [False, True])
@pytest.mark.parametrize("change", OF_TENSORS.values(), ids=OF_TENSORS)
def test_changes_of_a_tensor(change: Change, had_hook: bool, in_graph: bool) -> None:
    tensors = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    kept = sum(tensors) if in_graph else None  # autograd holds the tensors, too
    if had_hook:  # whose table stays behind
        tensors[1].register_hook(lambda gradient: gradient).remove()
        tensors[1].register_post_accumulate_grad_hook(print).remove()
    snapshot = StateSnapshot()
    for tensor in tensors:
        snapshot.has_kind(tensor)
    assert snapshot.holds() and snapshot.holds()
    vars(tensors[0])["mark"] = 1  # a `__dict__` that has just been made is none of them
    assert snapshot.holds() and snapshot.holds()
    change(tensors[1])
    assert not snapshot.holds()
    del kept


class Doubling(nn.Parameter):
    """A parameter whose operators give twice what they do on plain ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is nn.functional.linear else result


class Named(nn.Parameter):
    """A parameter whose operators are those of plain ones."""


@pytest.mark.parametrize("earlier", [0, 1, 4])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_another_class(name: str, earlier: int) -> None:
    """A class that computes otherwise is refused by name, another one changes nothing."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @graphopt.TrainStep
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    parameter = getattr(model[1], name)
    for number in range(1 + earlier):
        parameter.__class__ = Named if number % 2 else nn.Parameter
        step(model, optimizer)
    assert len(step.captures) == 1
    parameter.__class__ = Doubling
    with pytest.raises(graphopt.CaptureError, match="class Doubling"):
        step(model, optimizer)
    parameter.__class__ = nn.Parameter
    step(model, optimizer)
    assert len(step.captures) == 1


def test_a_hook_in_place_of_another_one() -> None:
    tensor, snapshot = nn.Parameter(torch.ones(2)), StateSnapshot()
    handle = tensor.register_hook(lambda gradient: gradient)
    snapshot.has_kind(tensor)
    assert snapshot.holds() and snapshot.holds()
    handle.remove()
    assert not snapshot.holds()
    tensor.register_hook(lambda gradient: 2 * gradient)
    assert not snapshot.holds()
