"""Work on the host that a step does with a value of the graph: one line each, of every kind that is
refused. Any of them may stand in the step, behind its call, or in a function that it calls."""

from __future__ import annotations

import csv
import datetime
import io
import json
import logging
import operator
import pickle
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

logger = logging.getLogger("host work")
HISTORY: list[float] = []


class Program:
    """A model, an optimizer, and what a program keeps beside them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows: list[Any] = [1.0, 2.0]
        self.nested: dict[str, list[Any]] = {"loss": [0.5]}
        self.queue: deque[Any] = deque([1.0], maxlen=3)
        self.seen: set[Any] = {"a"}
        self.counter: Counter[str] = Counter()
        self.array = numpy.zeros(3)
        self.bytes = bytearray(b"ab")
        self.text = ""
        self.numbers = iter(range(100))
        self.path = folder / "rows.txt"
        self.path.write_text("")
        self.file = io.StringIO()
        self.table = csv.writer(self.file)

    def train(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def left(self) -> list[Any]:
        """All that it keeps."""
        kept = [self.rows, self.nested, self.queue, self.seen, self.counter, self.text, HISTORY]
        kept += [self.array, self.bytes, self.path.read_bytes(), self.file.getvalue()]
        return [*map(str, kept), *(p.tolist() for p in self.model.parameters())]


Work = Callable[[Program, Tensor], object]


def add_in_place(p: Program, loss: Tensor) -> None:
    p.rows += [loss.item()]


def delete_slice(p: Program, loss: Tensor) -> None:
    del p.rows[:1]


def set_slice(p: Program, loss: Tensor) -> None:
    p.rows[:] = [loss.item()]


def loop_that_adds(p: Program, loss: Tensor) -> None:
    for value in (loss.item(), 1.0):
        p.nested["loss"].append(value)


def append_to_a_global(p: Program, loss: Tensor) -> None:
    HISTORY.append(loss.item())


def append_then_read(p: Program, loss: Tensor) -> None:
    p.rows.append(loss.item())
    p.text = str(len(p.rows))


CHANGES: tuple[Work, ...] = (
    lambda p, loss: p.rows.append(loss.item()),
    lambda p, loss: p.rows.append("text"),
    lambda p, loss: p.rows.append(loss.clone()),
    lambda p, loss: p.rows.append({"loss": loss.item()}),
    lambda p, loss: p.rows.extend([loss.item(), 2.0]),
    lambda p, loss: p.rows.insert(0, loss.item()),
    lambda p, loss: list.append(p.rows, loss.item()),
    lambda p, loss: operator.iadd(p.rows, [loss.item()]),
    lambda p, loss: p.rows.reverse(),
    lambda p, loss: p.nested["loss"].append(loss.item()),
    lambda p, loss: p.queue.append(loss.item()),
    lambda p, loss: p.queue.appendleft(loss.item()),
    lambda p, loss: p.bytes.append(7),
    lambda p, loss: list(map(p.rows.append, [loss.item()])),
    *(add_in_place, delete_slice, set_slice, loop_that_adds),
    *(append_to_a_global, append_then_read),
)
"""Containers outside that change."""


def keep_text(make: Callable[[Tensor], str]) -> Work:
    def keep(p: Program, loss: Tensor) -> None:
        p.text = make(loss)

    return keep


TEXTS: tuple[Work, ...] = tuple(
    map(
        keep_text,
        (
            lambda loss: f"loss {loss.item():.3f}",
            lambda loss: f"{loss}",
            lambda loss: f"{loss.item()!r}",
            lambda loss: f"loss {loss:.3f}",
            lambda loss: "loss %.3f" % loss.item(),  # noqa: UP031
            lambda loss: "%s" % loss,  # noqa: UP031
            lambda loss: "loss {:.3f}".format(loss.item()),  # noqa: UP032
            lambda loss: "{0:.3f}".format(loss),  # noqa: UP030, UP032
            lambda loss: str(loss.item()),
            lambda loss: str(loss),
            lambda loss: repr(loss),
            lambda loss: format(loss.item(), ".2e"),
            lambda loss: " ".join(map(str, [loss.item(), 1.0])),
            lambda loss: json.dumps({"loss": loss.item()}),
            lambda loss: "loss: " + str(loss.item()),
            lambda loss: str([loss.item()]),
            lambda loss: str({"loss": loss}),
        ),
    )
)
"""Texts with a value of the graph in them."""


def write_row(p: Program, loss: Tensor) -> None:
    with p.path.open("a") as file:
        file.write("row\n")


def open_and_write(p: Program, loss: Tensor) -> None:
    with open(p.path, "a") as file:
        print("row", file=file)


def redirected(p: Program, loss: Tensor) -> None:
    before, sys.stdout = sys.stdout, p.file
    print("shown")
    sys.stdout = before


SHOWN: tuple[Work, ...] = (
    lambda p, loss: print("a line"),
    lambda p, loss: print("loss", loss.item()),
    lambda p, loss: print(loss),
    lambda p, loss: print("a line", file=p.file),
    lambda p, loss: sys.stdout.write("a line\n"),
    lambda p, loss: logger.warning("loss %f", loss.item()),
    lambda p, loss: logger.error("an error"),
    lambda p, loss: logging.getLogger("host work").log(40, "at a level"),
    lambda p, loss: warnings.warn("a warning", stacklevel=1),
    lambda p, loss: p.file.write("row"),
    lambda p, loss: p.file.writelines(["row"]),
    lambda p, loss: p.table.writerow([1, 2]),
    lambda p, loss: p.path.write_text("row"),
    lambda p, loss: json.dump([1], p.file),
    lambda p, loss: pickle.dump([1], p.path.open("wb")),
    lambda p, loss: torch.save(loss, io.BytesIO()),
    *(write_row, open_and_write, redirected),
)
"""What is printed, logged, warned of and written."""

CLOCKS: tuple[Work, ...] = (
    lambda p, loss: time.time(),
    lambda p, loss: time.perf_counter(),
    lambda p, loss: time.monotonic_ns(),
    lambda p, loss: datetime.datetime.now(),
    lambda p, loss: datetime.date.today(),
    lambda p, loss: time.strftime("%H:%M"),
    lambda p, loss: time.localtime(),
)
"""Clocks that are read."""


def fill_array(p: Program, loss: Tensor) -> None:
    p.array[0] = loss.item()


def keep_array(p: Program, loss: Tensor) -> None:
    p.text = str(loss.numpy().sum())


ARRAYS: tuple[Work, ...] = (
    *(fill_array, keep_array),
    lambda p, loss: loss.cpu().numpy(),
    lambda p, loss: numpy.asarray(loss),
    lambda p, loss: numpy.mean([loss.item(), 1.0]),
    lambda p, loss: numpy.add(p.array, 1, out=p.array),
    lambda p, loss: p.array.__iadd__(1),
)
"""Arrays of numpy's that are made of tensors, or changed."""
