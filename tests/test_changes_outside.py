"""What a step changes outside is done by every call, or refused: nothing at capture only."""

from __future__ import annotations

import array
import bisect
import contextlib
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import queue
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Effect = Callable[[Any, Tensor], object]


class Meter:
    """An object of the program's."""

    def __init__(self, last: Any = 0) -> None:
        self.last, self.seen = last, deque([1], maxlen=3)

    def update(self, value: Any) -> None:
        self.last = value
        self.seen.append(value)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def listened() -> logging.Logger:
    logger = logging.Logger("listened")
    logger.addHandler(Listener())
    return logger


def run(make: Callable[[], Any], effect: Effect, compiled: bool, calls: int = 6) -> list[Any]:
    """What a training leaves, call by call."""
    torch.manual_seed(1)
    model, kept = nn.Linear(4, 1), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        effect(kept, loss)
        return loss.detach()

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for x in torch.randn(calls, 5, 4):
        found.append([used(x).item(), plain(kept), model.weight.detach().tolist()])
    return found


def plain(value: Any) -> Any:
    """A value without identities."""
    if isinstance(value, Tensor):
        return "tensor", value.tolist()
    if isinstance(value, FunctionType):
        return value.__name__, [plain(cell.cell_contents) for cell in value.__closure__ or ()]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque, set, bytearray, array.array)):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, Slotted):
        return plain(value.a)
    return plain(vars(value)) if isinstance(value, (Meter, SimpleNamespace)) else value


def put(value: Callable[[Tensor], Any]) -> Effect:
    """Leaves something in an attribute and in a dictionary."""

    def effect(kept: SimpleNamespace, loss: Tensor) -> None:
        kept.last = value(loss)
        kept.table["last"] = value(loss)

    return effect


def closing(value: Any) -> Callable[[], Any]:
    return lambda: value


MADE: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda loss: Meter(2),
    "object of a number read": lambda loss: Meter(loss.item()),
    "object of a tensor": lambda loss: [Meter(loss.detach())],
    "object with slots": lambda loss: Slotted([loss.item()]),
    "namespace": lambda loss: SimpleNamespace(a=loss.item()),
    "set": lambda loss: {1, 2},
    "function": lambda loss: closing(3),
    "function of a number read": lambda loss: closing(loss.item()),
    "array": lambda loss: np.arange(3.0),
    "array of C's": lambda loss: array.array("d", [1.0]),
    "bytes": lambda loss: bytearray(b"ab"),
}


def rows() -> SimpleNamespace:
    return SimpleNamespace(rows=[], last=None, table={})


@pytest.mark.parametrize("name", MADE)
def test_objects_that_the_step_makes_are_refused(name: str) -> None:
    """Each call would have to leave others; lists, dictionaries and data classes it can."""
    with pytest.raises(graphopt.CaptureError, match="last") as refused:
        run(rows, put(MADE[name]), True)
    assert "kept.last = value(loss)" in str(refused.value)


def counted(kept: Any, loss: Tensor) -> None:
    kept.append(loss.item())
    if len(kept) > 3:
        kept.pop(0)


def numbered(kept: Any, loss: Tensor) -> None:
    kept.append({"step": len(kept), "loss": loss.item()})


def by_name(kept: Any, loss: Tensor) -> None:
    for name, value in {"loss": loss, "double": loss * 2}.items():
        kept[name].append(value.item())


def of_arrays(kept: Any, loss: Tensor) -> None:
    kept.append((torch.from_numpy(np.eye(3)).sum() * loss.detach()).item())


def of_tensors(kept: Any, loss: Tensor) -> None:
    kept.append(torch.tensor([loss.detach(), loss.detach() * 2]))


def counts_in_c(kept: Any, loss: Tensor) -> None:
    np.add(kept, 1, out=kept)


def written_later(kept: Any, loss: Tensor) -> None:
    values = np.zeros(3)
    tensor = torch.from_numpy(values)
    values[0] = 2
    kept.append((tensor.sum() * loss.detach()).item())


def in_an_exit(kept: Any, loss: Tensor) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(kept.append, 1)


@functools.lru_cache
def remembered(kept: SimpleNamespace) -> int:
    kept.last = 3
    return 1


@functools.lru_cache
def appending(kept: SimpleNamespace) -> list[int]:
    kept.rows.append(2)
    return kept.rows


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__


def hashed() -> Hashed:
    return Hashed(rows=[], last=None)


REFUSED: dict[str, tuple[Callable[[], Any], Effect]] = {
    "list trimmed by its length": (list, counted),
    "rows numbered by the length": (list, numbered),
    "default dictionary": (lambda: defaultdict(list), by_name),
    "tensor of an array": (list, of_arrays),
    "tensor of tensors": (list, of_tensors),
    "taken from an iterator": (itertools.count, lambda kept, loss: list(itertools.islice(kept, 2))),
    "bytearray.append": (lambda: bytearray(b"a"), lambda kept, loss: kept.append(1)),
    "array.append": (lambda: array.array("d"), lambda kept, loss: kept.append(1.0)),
    "popitem": (lambda: {i: i for i in range(99)}, lambda kept, loss: kept.popitem()),
    "multiplied": (lambda: [1], lambda kept, loss: kept.__imul__(2)),
    "append for a key": (lambda: [1], lambda kept, loss: max([1], key=kept.append)),
    "append at an exit": (lambda: [1], in_an_exit),
    "insort": (lambda: [1], lambda kept, loss: bisect.insort(kept, 2)),
    "reduce": (lambda: [1], lambda kept, loss: functools.reduce(list.__iadd__, [[1]], kept)),
    "generator": (rows, put(lambda loss: (i for i in range(3)))),
    "iterator": (rows, put(lambda loss: iter([1]))),
    "module": (rows, put(lambda loss: nn.Linear(2, 2))),
    "file": (rows, put(lambda loss: io.StringIO())),
    "object in a set": (set, lambda kept, loss: kept.add(Meter())),
    "queue": (queue.Queue, lambda kept, loss: kept.put(1)),
    "simple queue": (queue.SimpleQueue, lambda kept, loss: kept.put(1)),
    "event": (threading.Event, lambda kept, loss: kept.set()),
    "lock": (threading.Lock, lambda kept, loss: kept.acquire(blocking=False)),
    "context variable": (lambda: contextvars.ContextVar("v"), lambda kept, loss: kept.set(3)),
    "open file": (io.StringIO, lambda kept, loss: kept.truncate(0)),
    "array into a file": (io.BytesIO, lambda kept, loss: np.save(kept, np.zeros(1))),
    "logger": (listened, lambda kept, loss: max(["seen"], key=kept.warning)),
    "large array": (lambda: np.zeros(1 << 18), counts_in_c),
    "array of C's items": (lambda: (ctypes.c_int * 3)(), lambda kept, loss: kept.__setitem__(0, 1)),
    "weak dictionary": (weakref.WeakKeyDictionary, lambda kept, loss: kept.update({Meter: 1})),
    "item in a remembered call": (hashed, lambda kept, loss: remembered(kept)),
    "append in a remembered call": (hashed, lambda kept, loss: appending(kept)),
    "array behind a tensor": (list, written_later),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_later_call_would_do_is_refused(name: str) -> None:
    make, effect = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        run(make, effect, compiled=True, calls=3)
    assert "test_changes_outside.py" in str(caught.value)


def test_an_object_that_is_put_into_two_places_is_one() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(rows())
        return made[-1]

    def twice(kept: Any, loss: Tensor) -> None:
        kept.first = kept.second = [1]

    assert run(make, twice, compiled=True) == run(make, twice, compiled=False)
    assert all(kept.first is kept.second for kept in made)
