"""Files that a step opens to write, against eager."""

# ruff: noqa: SIM115 - ways to open that are tested

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.errors import CaptureError
from loops import Loop, graphs_of, run, trained

Body = Callable[[Path, int, float], Any]


def written(folder: Path, number: int, loss: float) -> Any:
    with open(folder / "a.txt", "a") as file, open(f"{folder}/b.txt", "w") as other:
        size = file.write(f"{number} {loss:.4f}\n")
        other.writelines([f"{number}", "="])
        print("both", loss, file=file)
        print("outside")
    return size


def closed(folder: Path, number: int, loss: float) -> Any:
    file = open(str(folder / "a.bin"), mode="ab")
    file.write(b"abc")
    file.close()
    try:
        file.write(b"d")
    except ValueError as error:
        return str(error)


def rows(folder: Path, number: int, loss: float) -> Any:
    path = os.path.join(folder, "a.csv")
    new = not os.path.exists(path)
    with open(path, "a", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        if new:
            table.writerow(["number", "loss"])
        table.writerows([[number, loss], [None, f"a\t{loss:.2f}"]])
        named = csv.DictWriter(file, ["number", "loss"])
        named.writeheader()
        named.writerow({"number": number, "loss": loss})


def dumped(folder: Path, number: int, loss: float) -> Any:
    with open(folder / "a.json", "w", encoding="utf8") as file:
        json.dump({"loss": loss, "all": [number, "text", None]}, file, indent=2)


def made(body: Body, folder: Path) -> Callable[[], Loop]:
    def make() -> Loop:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in folder.iterdir():
            each.unlink()

        def step(number: int, x: Tensor) -> Any:
            return body(folder, number, trained(model, optimizer, x).item())

        def left() -> Any:
            return [model, *((p.name, p.read_bytes()) for p in sorted(folder.iterdir()))]

        return Loop(step, left)

    return make


@pytest.mark.parametrize(("body", "graphs"), [(written, 1), (closed, 1), (rows, 2), (dumped, 1)])
def test_each_call_writes_what_eager_code_writes(body: Body, graphs: int, tmp_path: Path) -> None:
    assert graphs_of(made(body, tmp_path), 4) == graphs


def left_open(folder: Path, number: int, loss: float) -> None:
    open(folder / "a.txt", "a").write(f"{loss}")


def asked(folder: Path, number: int, loss: float) -> Any:
    with open(folder / "a.txt", "a") as file:
        return file.tell()


def read(folder: Path, number: int, loss: float) -> Any:
    with open(folder / "a.txt", "a") as file:
        file.write("a")
    return (folder / "a.txt").read_text()


@pytest.mark.parametrize(
    ("body", "reason"),
    [(left_open, "leaves a file open"), (asked, "for its tell"), (read, "asks about files")],
)
def test_what_cannot_be_done_in_each_call(body: Body, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=reason):
        run(made(body, tmp_path), 1, compiled=True)
    assert list(tmp_path.iterdir()) == []
