"""What a step adds to a list, queue or set by going through a tensor, a generator or the like."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt
from graphopt.errors import CaptureError

GIVING: dict[str, Callable[[Any, Tensor], Any]] = {
    "tensor": lambda s, y: y,
    "generator": lambda s, y: (each.item() * 2 for each in y),
    "by number": lambda s, y: (float(v) if i == s.n else -1.0 for i, v in enumerate(y)),
    "map": lambda s, y: map(float, y),
    "zip": lambda s, y: zip(range(3), y.tolist(), strict=True),
    "range": lambda s, y: range(s.n),
    "array": lambda s, y: y.numpy().copy(),
    "items": lambda s, y: {"a": y, "b": 2}.items(),
    "values": lambda s, y: {"a": y, "b": 2}.values(),
    "keys": lambda s, y: {"a": y, "b": 2},
    "text": lambda s, y: "abc",
    "queue": lambda s, y: deque([1, y]),
    "reversed": lambda s, y: reversed([1, y]),
    "filtered": lambda s, y: filter(None, [0, s.n, 2]),
    "numbered": lambda s, y: enumerate(y.tolist()),
    "chained": lambda s, y: itertools.chain([1], y.tolist()),
    "how long it is by then": lambda s, y: (len(s.rows) for _ in range(2)),
    "outside": lambda s, y: s.names.values(),
}


def extend(s: Any, items: Any) -> None:
    s.rows.extend(items)


def extend_by_class(s: Any, items: Any) -> None:
    list.extend(s.rows, items)


def extend_by_name(s: Any, items: Any) -> None:
    add = s.rows.extend
    add(items)


def add(s: Any, items: Any) -> None:
    s.rows += items


def queue(s: Any, items: Any) -> None:
    s.last.extend(items)


def queue_in_front(s: Any, items: Any) -> None:
    s.last.extendleft(items)


HOW = (extend, extend_by_class, extend_by_name, add, queue, queue_in_front)


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple, deque)):
        return [plain(each) for each in value]
    return value


def left_by(how: Callable[[Any, Any], None], kind: str, compiled: bool) -> list[Any]:
    giving = GIVING[kind]

    def step(s: Any, w: Tensor, x: Tensor) -> Tensor:
        y = w * x
        how(s, giving(s, y))
        s.n += 1
        return y.sum()

    torch.manual_seed(0)
    s = SimpleNamespace(rows=[], last=deque(maxlen=7), n=0, names={"p": 1, "q": "two"})
    w, left = torch.randn(3), []
    run = graphopt.compile(step, pipeline="none") if compiled else step
    for _ in range(3):
        total = run(s, w, torch.randn(3))
        left.append(plain([total, s.rows, s.last, s.n]))
    return left


@pytest.mark.parametrize("kind", GIVING)
def test_all_that_a_list_is_extended_by(kind: str) -> None:
    assert left_by(extend, kind, True) == left_by(extend, kind, False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", GIVING)
@pytest.mark.parametrize("how", HOW)
def test_all_ways_to_add_several(how: Callable[[Any, Any], None], kind: str) -> None:
    assert left_by(how, kind, True) == left_by(how, kind, False)


def test_a_set_is_updated_by_what_a_generator_gives() -> None:
    def step(s: Any, x: Tensor) -> Tensor:
        s.seen.update(name.upper() for name in s.names)
        return x * 2

    s = SimpleNamespace(seen=set(), names=["a", "b"])
    run = graphopt.compile(step, pipeline="none")
    run(s, torch.ones(2))
    s.names = ["c"]
    run(s, torch.ones(2))
    assert s.seen == {"A", "B", "C"}


def test_what_a_generator_gives_before_it_raises_is_in_the_list() -> None:
    def some(x: Tensor) -> Iterator[float]:
        yield x.sum().item()
        raise ValueError("no more")

    def step(s: Any, x: Tensor) -> Tensor:
        try:
            s.rows.extend(some(x))
        except ValueError:
            s.rows.append("ended")
        return x * 2

    s = SimpleNamespace(rows=[])
    run = graphopt.compile(step, pipeline="none")
    for number in (1.0, 2.0):
        run(s, torch.full((2,), number))
    assert s.rows == [2.0, "ended", 4.0, "ended"]


def test_sets_take_no_other_kinds_by_an_operator() -> None:
    def step(s: Any, x: Tensor) -> Tensor:
        s.seen += [1]
        return x

    with pytest.raises(CaptureError, match="TypeError: unsupported operand"):
        graphopt.compile(step, pipeline="none")(SimpleNamespace(seen={1}), torch.ones(2))
