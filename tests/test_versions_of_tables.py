"""Words of memory, such as versions of dictionaries, stand for what is in objects: each kind of
change is noticed, also in those that change again and again, and where no word can be read."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import CellType
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt._compat import memory_words
from graphopt.guards.snapshots import snapshot as unchanged
from graphopt.guards.snapshots.conditions import Referred
from graphopt.guards.snapshots.snapshot import StateSnapshot


@pytest.fixture(params=["words", "no words"], autouse=True)
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test as it is, and as on a Python whose memory is not as expected."""
    if request.param == "no words":
        for name in ("version_word", "size_word", "content_word", "function_word"):
            monkeypatch.setattr(unchanged, name, lambda *of: None)
        monkeypatch.setattr(unchanged, "hook_words", lambda tensor: [])


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


OF_LISTS: dict[str, Change] = {
    "item": lambda held: held.__setitem__(1, 2.0),
    "equal": lambda held: held.__setitem__(0, True),
    "added": lambda held: held.append(3),
    "removed": lambda held: held.pop(),
    "swapped": lambda held: held.reverse(),
    "cleared": lambda held: held.clear(),
}


class OwnList(list[Any]):
    """A list of another class."""


@pytest.mark.parametrize("kind", [list, OwnList])
@pytest.mark.parametrize("change", OF_LISTS.values(), ids=OF_LISTS)
def test_changes_of_a_list(change: Change, kind: type[list[Any]]) -> None:
    whole, single, held = StateSnapshot(), StateSnapshot(), kind([1, 2])
    whole.has_items([5])  # beside others, to which its items do not count
    whole.has_items(held)
    whole.has_items([2])
    single.has(held, 0, held[0])
    single.has(held, 1, held[1])
    single.has_size(held)
    assert whole.holds() and whole.holds() and single.holds() and single.holds()
    change(held)
    assert not whole.holds()
    assert not single.holds()


def test_another_factory_of_default_items() -> None:
    table, snapshot = defaultdict(list, {"value": 1}), StateSnapshot()
    snapshot.has_items(table)
    assert snapshot.holds() and snapshot.holds()
    table.default_factory = tuple
    assert not snapshot.holds()


def scaled(x: float, by: float = 2.0, *, plus: float = 1.0) -> float:
    """A function whose code and defaults change."""
    return x * by + plus


def other(x: float) -> float:
    """A function of which one is the code."""
    return x


OF_FUNCTIONS: dict[str, Change] = {
    "code": lambda function: setattr(function, "__code__", other.__code__),
    "defaults": lambda function: setattr(function, "__defaults__", (3.0,)),
    "no defaults": lambda function: setattr(function, "__defaults__", None),
    "defaults by name": lambda function: setattr(function, "__kwdefaults__", {"plus": 1.0}),
}


@pytest.mark.parametrize("change", OF_FUNCTIONS.values(), ids=OF_FUNCTIONS)
def test_changes_of_a_function(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        monkeypatch.setattr(scaled, name, getattr(scaled, name))
    snapshot, holder = StateSnapshot(), weakref.ref(scaled)
    snapshot.has_attribute(holder, "__code__", Referred(weakref.ref(scaled.__code__)))
    snapshot.has_attribute(holder, "__defaults__", scaled.__defaults__)
    snapshot.has_attribute(holder, "__kwdefaults__", scaled.__kwdefaults__)
    assert snapshot.holds() and snapshot.holds()
    change(scaled)
    assert not snapshot.holds()


@pytest.mark.parametrize("earlier", [0, 6])
def test_changes_of_a_closure_variable(earlier: int) -> None:
    value = object()
    cell, beside, snapshot = CellType(value), CellType(0), StateSnapshot()
    snapshot.has_attribute_of(cell, "cell_contents", value)
    snapshot.has_attribute_of(beside, "cell_contents", 0)
    for number in range(earlier):
        beside.cell_contents = number + 1
        assert not snapshot.holds()
        beside.cell_contents = 0
        assert snapshot.holds()
    assert snapshot.holds() and snapshot.holds()
    cell.cell_contents = object()
    assert not snapshot.holds()
    del cell.cell_contents
    assert not snapshot.holds()


def test_another_object_in_a_closure_variable_of_which_none_is_kept_alive() -> None:
    for _ in range(20):  # in some of them at the same address
        cell, snapshot = CellType(Owner()), StateSnapshot()
        referred = Referred(weakref.ref(cell.cell_contents))
        snapshot.has_attribute_of(cell, "cell_contents", referred)
        assert snapshot.holds() and snapshot.holds()
        cell.cell_contents = None
        cell.cell_contents = Owner()
        assert not snapshot.holds()


PLACES: dict[str, Callable[[StateSnapshot, Owner], Any]] = {
    "item": lambda snapshot, owner: snapshot.has_object(vars(owner), "value", owner.value),
    "attribute": lambda snapshot, owner: snapshot.has_attribute(
        weakref.ref(owner), "value", Referred(weakref.ref(owner.value))
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_nothing_in_place_of_an_object_that_is_gone(
    place: Callable[[StateSnapshot, Owner], Any],
) -> None:
    owner, snapshot = Owner(), StateSnapshot()
    owner.value = Owner()
    place(snapshot, owner)
    assert snapshot.holds() and snapshot.holds()
    owner.value = None
    assert not snapshot.holds()


def test_words_are_read_where_python_is_known() -> None:
    """This says nothing of correctness: without them each call takes longer."""
    known = sys.version_info < (3, 13)
    assert (memory_words.version_word({"a": 1}) is not None) is known
    assert memory_words.size_word([]) and memory_words.content_word(CellType())
    assert memory_words.function_word(other, "__code__")
    assert len(memory_words.hook_words(torch.ones(1))) == 2
