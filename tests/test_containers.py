"""Lists and dictionaries that a step makes, returns, keeps or goes through, against eager."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from loops import Loop, graphs_of, trained

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


class Given:
    def __init__(self, rows: Any, loss: Any) -> None:
        self.rows, self.loss = rows, loss


def _reversed(s: Any, loss: Tensor) -> None:
    for table in reversed(s.tables):
        table["n"] = table.get("n", 0) + 1
        table["loss"] = loss.item()


def _read(s: Any, loss: Tensor) -> Any:
    return sum(index * sum(row) + len(row) for index, row in enumerate(s.seen))


GIVEN_ON: list[Callable[[Any, Tensor], Any]] = [_reversed, _read]


LOOKED_AT: dict[str, Callable[[Any, Tensor], Any]] = {
    "largest": lambda s, loss: max(row for row in s.seen),
    "largest of pairs": lambda s, loss: max((1, row) for row in s.seen),
    "sorted": lambda s, loss: sorted(row for _, row in enumerate(s.seen)),
    "zip sorted": lambda s, loss: sorted(zip([1, 1], s.seen, strict=True)),
    "any": lambda s, loss: any(row for row in s.seen),
    "returned in a list": lambda s, loss: [row for _, row in enumerate(s.seen)],
    "returned in a dictionary": lambda s, loss: {"a": {"b": s.seen}},
    "returned in an object": lambda s, loss: vars(Given(s.seen, 1)),
}


def _run(effect: Callable[[Any, Tensor], Any], compiled: bool) -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    s = SimpleNamespace(
        tables=[{}, {}], seen=[[], [3]],
    )  # fmt: skip

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return effect(s, loss)

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for call in range(6):
        if call in (2, 4):
            s.seen[1].append(call)
        returned = run(torch.randn(4, 3))
        found.append(repr((returned, s.tables)))
    return found, len(run.captures) if compiled else 0


@pytest.mark.parametrize("effect", GIVEN_ON)
def test_loops_see_what_they_use(effect: Callable[[Any, Tensor], Any]) -> None:
    expected, _ = _run(effect, compiled=False)
    found, graphs = _run(effect, compiled=True)
    assert found == expected
    assert graphs <= (3 if effect is _read else 2)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_is_looked_at_within(name: str) -> None:
    """Lists in lists that a generator expression gives, or that are returned, were those of the
    capture ever after."""
    assert _run(LOOKED_AT[name], compiled=True)[0] == _run(LOOKED_AT[name], compiled=False)[0]


class AttrDict(dict[str, Any]):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__ = self


class Trained:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.h = AttrDict(scale=2.0, steps=0, log=[], inner=AttrDict(power=2))
        self.model = nn.Linear(6, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def update(self, h: Any, x: Tensor) -> Tensor:
        loss = self.model(x).abs().pow(h.inner.power).mean() * h["scale"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def read(self, x: Tensor) -> Tensor:
        return self.update(self.h, x)

    def counted(self, x: Tensor) -> Tensor:
        self.h.steps += 1
        return self.update(self.h, x) * self.h.steps

    def kept(self, x: Tensor) -> None:
        loss = self.update(self.h, x)
        self.h["last"] = loss.item()
        self.h.best = min(self.h.get("best", 100.0), loss.item())


def rows(step: Callable[[Trained, Tensor], Any], captured: bool) -> list[Any]:
    trained = Trained()
    call: Callable[..., Any] = graphopt.compile(step) if captured else step
    given = [call(trained, torch.randn(4, 6)) for _ in range(5)]
    found = [None if each is None else each.item() for each in given]
    return [found, repr(trained.h), trained.model.weight.tolist()]


@pytest.mark.parametrize("step", [Trained.read, Trained.counted, Trained.kept])
def test_as_eager(step: Callable[[Trained, Tensor], Any]) -> None:
    assert rows(step, True) == rows(step, False)


class Doubling(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value * 2)


class Attributes(dict[str, Any]):
    """Raises another error than `hasattr` knows."""

    def __getattr__(self, key: str) -> Any:
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


def doubling(table: Any, number: int, loss: Tensor) -> None:
    table["loss"] = loss.item()
    table["tensor"] = loss.detach()


def attributes(table: Any, number: int, loss: Tensor) -> None:
    table.sum = table.get("sum", 0) + loss.item()
    table["loss"] = loss.detach()


def orders(table: Any, number: int, loss: Tensor) -> None:
    table.update(loss=loss.detach(), number=number)
    table.setdefault("first", loss.item())


CASES: list[tuple[Callable[[Any, int, Tensor], None], Callable[[], Any]]] = [
    (doubling, Doubling),
    (attributes, Attributes),
    (orders, Attributes),
]


def _left(table: Any) -> Any:
    return [dict(table), list(table)]


@pytest.mark.parametrize(("body", "made"), CASES, ids=[body.__name__ for body, _ in CASES])
def test_each_call_leaves_there_what_eager_code_leaves(body: Any, made: Any) -> None:
    def make() -> Loop:
        model, table = nn.Linear(4, 2), made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int, x: Tensor) -> None:
            trained(model, optimizer, x)
            body(table, number, model(x).square().mean())

        return Loop(step, lambda: [model, _left(table)])

    assert graphs_of(make, 6) <= 4


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, lambda: defaultdict(list)], ids=["dict", "ordered", "default"]
)
def test_keys_are_in_the_order_of_eager_code(make: Callable[[], Any]) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, table = nn.Linear(2, 1), make()
        table["before"] = 1

        def step(x: Tensor) -> None:
            loss = model(x).sum()  # noqa: B023
            sums = table.setdefault("sum", {"loss": 0.0})  # noqa: B023
            sums["loss"] += loss.item()
            table["name"] = "train"  # noqa: B023
            table["calls"] = table.get("calls", 0) + 1  # noqa: B023
            table["loss"] = loss.detach()  # noqa: B023

        run = graphopt.compile(step) if compiled else step
        for index in range(3):
            run(torch.ones(2) * index)
        found.append(str(table))
    assert found[0] == found[1]


def _state() -> SimpleNamespace:
    return SimpleNamespace(
        rows=[], queue=deque(maxlen=3), table={}, lists=defaultdict(list), counts=Counter(),
        found=None, history=[],
    )  # fmt: skip


def counted(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.counts["n"] += 1
    s.table["n"] = s.table.get("n", 0) + 1
    s.table["loss"] = s.table.get("loss", 0.0) + loss.item()
    s.table["std"] = s.table.get("std", 0) + out.std().item()
    s.table["best"] = max(s.table.get("best", -1.0), out.std().item())


def taken_out(s: Any, i: int, loss: Tensor, out: Tensor) -> None:
    s.table["std"] = s.table.pop("std", 0) + out.std().item()


STEPS: list[Callable[..., None]] = [counted, taken_out]


def _run_with_state(effect: Callable[..., None], compiled: bool, state: Any = None) -> list[Any]:
    torch.manual_seed(0)
    model, s = nn.Linear(3, 2), state or _state()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(i: int, x: Tensor) -> None:
        optimizer.zero_grad()
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        effect(s, i, loss, out)

    run: Any = graphopt.compile(step) if compiled else step
    rows = []
    for i in range(8):
        run(i, torch.randn(4, 3))
        rows.append(repr(vars(s)))
    return rows


@pytest.mark.parametrize("effect", STEPS)
def test_every_call_is_eager_s(
    effect: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    eager = _run_with_state(effect, compiled=False), capsys.readouterr().out
    assert eager == (_run_with_state(effect, compiled=True), capsys.readouterr().out)
