"""Objects with tensors among the arguments, such as batches: taken apart as dictionaries are."""

from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt

Step = Callable[[Any, Any, Any], Any]


class Batch:
    def __init__(self, x: Any, y: Any, **more: Any) -> None:
        self.x, self.y = x, y
        vars(self).update(more)

    def to(self, device: str) -> Batch:
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self

    @property
    def doubled(self) -> Any:
        return self.x * 2

    def __getattr__(self, name: str) -> Any:
        if name == "shifted":
            return self.x + 1
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    text: str = ""


class Encoding(collections.UserDict[str, Any]):
    """As the tokenizers of transformers give."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: str) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Store:
    def __init__(self, parent: Any, mapping: dict[str, Any]) -> None:
        self._parent, self._mapping = weakref.ref(parent), mapping

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_mapping"][name]
        except KeyError:
            raise AttributeError(name) from None


class Graph:
    """As PyTorch Geometric's `Data`."""

    def __init__(self, **mapping: Any) -> None:
        self.__dict__["_store"] = Store(self, mapping)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._store._mapping[name] = value


def trained(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (tuple, list)):
        return type(value), [*map(described, value)]
    if isinstance(value, dict):
        return [(key, described(each)) for key, each in value.items()]
    if isinstance(value, weakref.ref):
        return "weak"
    return described(vars(value)) if hasattr(value, "__dict__") else repr(value)


def stepping(
    step: Step, given: Callable[[int], Any], wrap: Callable[[Any], Any], calls: int
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = wrap(lambda model, optimizer, batch: step(model, optimizer, batch))
    found = []
    for number in range(calls):
        batch = given(number)
        found += [described(run(model, optimizer, batch)), described(batch)]
    return [*found, described(model.weight)], len(getattr(run, "captures", ()))


def check(step: Step, given: Callable[[], Callable[[int], Any]], graphs: int, calls: int) -> None:
    torch.manual_seed(1)
    expected, _ = stepping(step, given(), lambda step: step, calls)
    torch.manual_seed(1)
    found, captured = stepping(step, given(), graphopt.compile, calls)
    assert found == expected
    assert captured == graphs


def x(rows: int = 2) -> Tensor:
    return torch.randn(rows, 4)


def y(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3)


def sets(model: Any, optimizer: Any, b: Any) -> Any:
    b.prediction = model(b.x).detach()
    b.x = b.x * 2
    b.done = True
    return trained(model, optimizer, b.x, b.y)


def counts(model: Any, optimizer: Any, b: Any) -> Any:
    b.n += 1
    return trained(model, optimizer, b.x * b.n, b.y), b.n


def items(model: Any, optimizer: Any, b: Any) -> Any:
    b["z"] = b.pop("x") * 2
    return trained(model, optimizer, b["z"], b["y"]), list(b), "x" in b


def two(model: Any, optimizer: Any, pair: Any) -> Any:
    first, second = pair
    first.x = first.x * 2
    return trained(model, optimizer, first.x + second.x, second.y)


def shared(number: int) -> Any:
    batch = Batch(x(), y())
    return (batch, batch if number else Batch(x(), y()))


def one_tensor(number: int) -> Any:
    tensor = x()
    return Batch(tensor, y(), other=tensor if number else x())


def rewritten(model: Any, optimizer: Any, b: Any) -> Any:
    b.x.add_(1)
    return trained(model, optimizer, b.x + b.other, b.y)


def moved(model: Any, optimizer: Any, given: Any) -> Any:
    given["other"] = given["batch"]
    return trained(model, optimizer, given["batch"].x, given["batch"].y)


def appended(model: Any, optimizer: Any, b: Any) -> Any:
    b.rows.append(b.x * 2)
    return trained(model, optimizer, sum(b.rows), b.y)


def plain(model: Any, optimizer: Any, b: Any) -> Any:
    return trained(model, optimizer, b.x, b.y)


def batch(number: int) -> Any:
    return Batch(x(), y())


def encoding(number: int) -> Any:
    return Encoding(x=x(), y=y())


CASES: dict[str, tuple[Step, Callable[[int], Any], int]] = {
    "attributes": (plain, batch, 1),
    "moved to a device": (lambda m, o, b: plain(m, o, b.to("cpu")), batch, 1),
    "properties": (lambda m, o, b: trained(m, o, b.doubled + b.shifted, b.y), batch, 1),
    "frozen": (plain, lambda number: Frozen(x(), y(), str(number)), 1),
    "text read": (
        lambda m, o, b: (plain(m, o, b), b.text),
        lambda number: Frozen(x(), y(), str(number // 2)),
        2,
    ),
    "namespace": (plain, lambda number: types.SimpleNamespace(x=x(), y=y()), 1),
    "dictionary": (lambda m, o, b: trained(m, o, b["x"], b.y), encoding, 1),
    "keywords": (lambda m, o, b: trained(m, o, **b.to("cpu")), encoding, 1),
    "items": (items, encoding, 1),
    "graph": (
        lambda m, o, b: trained(m, o, b.x[b.index], b.y),
        lambda number: Graph(x=x(), y=y(), index=torch.tensor([1, number % 2]), name=str(number)),
        1,
    ),
    "numbers": (lambda m, o, b: trained(m, o, b.x * b.n, b.y), lambda n: Batch(x(), y(), n=n), 1),
    "nests": (
        lambda m, o, b: trained(m, o, sum(b.rows) + b.inner.x, b.inner.y),
        lambda number: Batch(0, 0, rows=[x(), x()], inner=Batch(x(), y())),
        1,
    ),
    "in a list": (
        lambda m, o, each: [plain(m, o, b) for b in each],
        lambda number: [Batch(x(), y()), Batch(x(), y())],
        1,
    ),
    "shapes": (plain, lambda number: Batch(x(2 + number % 2), y(2 + number % 2)), 2),
    "attributes set": (sets, batch, 1),
    "counted": (counts, lambda number: Batch(x(), y(), n=number), 1),
    "one object or two": (two, shared, 2),
    "one tensor or two": (rewritten, one_tensor, 3),
    "left elsewhere": (moved, lambda number: {"batch": Batch(x(), y())}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_objects_of_each_call(case: str) -> None:
    step, given, graphs = CASES[case]
    check(step, lambda: given, graphs, 3)


def changing(text: bool) -> Callable[[int], Any]:
    """One object, which the program changes between two calls."""
    kept: Any = Batch(x(), y(), text="a", n=0)

    def given(number: int) -> Any:
        kept.x = x()
        kept.text = "ab"[number // 2] if text else "a"
        return kept

    return given


@pytest.mark.parametrize("text", [True, False])
def test_one_object_that_the_program_changes(text: bool) -> None:
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        return trained(model, optimizer, b.x * 2 if b.text == "a" else b.x, b.y)

    check(step, lambda: changing(text), 1 + text, 3)


@pytest.mark.parametrize("owner", ["model", "optimizer"])
def test_an_object_that_is_kept_is_that_of_each_call(owner: str) -> None:
    @graphopt.compile
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        (model if owner == "model" else optimizer).last = b
        return trained(model, optimizer, b.x, b.y)

    model: Any = nn.Linear(4, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        given = batch(number)
        step(model, optimizer, given)
        assert (model if owner == "model" else optimizer).last is given


def test_nothing_of_a_batch_is_kept_alive() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = graphopt.compile(plain)
    for _ in range(2):
        given = Batch(x(), y())
        step(model, optimizer, given)
        gone = weakref.ref(given)
        del given
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("new", [lambda row: row * 2, lambda row: None, lambda row: 3])
def test_a_changed_list_in_an_object_is_refused(new: Callable[[Any], Any], place: int) -> None:
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        first = b.rows[0]
        b.rows[place] = new(first)
        return trained(model, optimizer, first, b.y)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = Batch(x(), y(), rows=[x(), "text", x()])
    before = [*given.rows]
    with pytest.raises(graphopt.CaptureError, match="changes a list among its arguments"):
        graphopt.compile(step)(model, optimizer, given)
    assert all(now is then for now, then in zip(given.rows, before, strict=True))


PARTS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda b: b.mixed,
    "list": lambda b: b.rows,
    "tuple in a list": lambda b: b.rows[1],
    "dictionary in a tuple": lambda b: b.deep[0],
    "object": lambda b: b.inner,
    "tuple in an object": lambda b: b.inner.mixed,
}


@pytest.mark.parametrize("part", PARTS)
def test_what_stands_in_an_object_is_left_in_another_place_itself(part: str) -> None:
    """What stands for it while the step is traced stays nowhere."""

    def step(model: Any, optimizer: Any, b: Any) -> Any:
        trained(model, optimizer, b.x, b.y)
        b.kept = PARTS[part](b)

    model = nn.Linear(4, 3)
    compiled = graphopt.compile(step)
    for _ in range(3):
        inner = Batch(x(), y(), mixed=(x(), 1))
        mixed, deep, rows = (x(), 2, None), ({"a": x()}, x()), [x(), (x(), x())]
        given = Batch(x(), y(), mixed=mixed, deep=deep, rows=rows, inner=inner)
        compiled(model, torch.optim.SGD(model.parameters(), 0.1), given)
        assert given.kept is PARTS[part](given)  # type: ignore[attr-defined]
        assert given.mixed is mixed and given.rows is rows  # type: ignore[attr-defined]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class TuplesInObjectsBatch:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pair, self.named = (x, y), Pair(x, y)
        self.nest, self.mixed = ((x, y), y * 2), (x, None, 3, y)
        self.rows = [(x, y), (y, x)]
        self.table = {"pair": (x, y)}


def unpacked(batch: TuplesInObjectsBatch) -> Any:
    x, y = batch.pair
    return x, y


def named(batch: TuplesInObjectsBatch) -> Any:
    return batch.named.x, batch.named[1]


def nested(batch: TuplesInObjectsBatch) -> Any:
    return batch.nest[0][0], batch.nest[1]


def mixed(batch: TuplesInObjectsBatch) -> Any:
    assert batch.mixed[1] is None
    return batch.mixed[0] * batch.mixed[2], batch.mixed[-1]


def in_a_list(batch: TuplesInObjectsBatch) -> Any:
    return batch.rows[0]


def in_a_table(batch: TuplesInObjectsBatch) -> Any:
    return [tensor * 1 for tensor in batch.table["pair"]]


def put_anew(batch: TuplesInObjectsBatch) -> Any:
    batch.pair = (batch.pair[0] * 2, batch.pair[1])
    batch.named = batch.named._replace(x=batch.pair[0])
    return batch.pair


WAYS: list[Callable[[TuplesInObjectsBatch], Any]] = [
    unpacked,
    named,
    nested,
    mixed,
    in_a_list,
    in_a_table,
    put_anew,
]


def _trained(way: Callable[[TuplesInObjectsBatch], Any], compiled: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: TuplesInObjectsBatch) -> Tensor:
        x, y = way(batch)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = graphopt.compile(step) if compiled else step
    left = []
    for _ in range(4):
        batch = TuplesInObjectsBatch(torch.rand(5, 3), torch.rand(5, 2))
        left.append([run(batch).item(), str(batch.pair), str(batch.named)])
    left.append([p.tolist() for p in model.parameters()])
    return left, len(run.captures) if isinstance(run, graphopt.TrainStep) else 1


@pytest.mark.parametrize("way", WAYS)
def test_tensors_in_tuples_are_inputs(way: Callable[[TuplesInObjectsBatch], Any]) -> None:
    left, graphs = _trained(way, True)
    assert left == _trained(way, False)[0]
    assert graphs == 1


def test_tuples_of_another_structure_have_a_graph_of_their_own() -> None:
    model = nn.Linear(3, 2)
    step = graphopt.compile(lambda batch: sum(model(x).sum() for x in batch.pair))
    for _ in range(2):
        for count in (1, 2):
            batch = TuplesInObjectsBatch(torch.rand(5, 3), torch.rand(5, 3))
            batch.pair = batch.pair[:count]  # type: ignore[assignment]
            assert torch.equal(step(batch), sum(model(x).sum() for x in batch.pair))
    assert len(step.captures) == 2


def test_a_constant_in_a_tuple_is_one_that_a_graph_holds_for() -> None:
    step = graphopt.compile(lambda batch: batch.mixed[0] * batch.mixed[2])
    for factor in (3, 4, 3):
        batch = TuplesInObjectsBatch(torch.rand(5, 3), torch.rand(5, 2))
        batch.mixed = (batch.mixed[0], None, factor, batch.mixed[3])
        assert torch.equal(step(batch), batch.mixed[0] * factor)
