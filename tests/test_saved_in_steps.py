"""Files that a step saves, copies and looks for, against eager."""

from __future__ import annotations

import argparse
import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError
from loops import told


class World:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.folder, self.path = str(folder), folder
        self.args = argparse.Namespace(lr=0.1, n=0)
        self.losses: list[float] = []
        self.best, self.found = 9.0, 0
        self.holder = SimpleNamespace(net=self.net)


def described(value: Any) -> Any:
    """A value of a file, with the kinds and flags of tensors."""
    if isinstance(value, Tensor):
        return type(value).__name__, value.requires_grad, told(value)
    if isinstance(value, dict):
        attributes = described(dict(vars(value))) if hasattr(value, "__dict__") else None
        return type(value).__name__, [(k, described(v)) for k, v in value.items()], attributes
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(each) for each in value]
    return type(value).__name__, vars(value) if isinstance(value, argparse.Namespace) else value


def files_in(folder: Path) -> list[Any]:
    found = sorted(each for each in folder.rglob("*") if each.is_file())
    loaded = [torch.load(each, weights_only=False) for each in found]
    return [(each.name, described(one)) for each, one in zip(found, loaded, strict=True)]


Body = Callable[[World, int, Tensor, Tensor], None]


def trained(body: Body, folder: Path, compiled: bool) -> tuple[list[Any], int]:
    folder.mkdir()
    world = World(folder)

    def step(number: int, x: Tensor) -> Tensor:
        loss: Tensor = world.net(x).square().mean()
        world.optimizer.zero_grad()
        loss.backward()
        world.optimizer.step()
        body(world, number, loss, x)
        return loss

    run: Any = graphopt.compile(step) if compiled else step
    found = []
    for number in range(4):
        loss = run(number, torch.randn(4, 3))
        left = [loss.detach(), world.net, vars(world.args), world.losses, world.best, world.found]
        found.append((told(left), files_in(folder)))
    return found, len(run.captures) if compiled else 0


def checkpoint(w: World, number: int, loss: Tensor, x: Tensor) -> None:
    if number % 2 == 0:
        state = {"model": w.net.state_dict(), "optimizer": w.optimizer.state_dict(), "n": number}
        path = os.path.join(w.folder, f"{number}.pt")
        torch.save({**state, "loss": loss, "value": loss.item(), "args": w.args}, path)


def best(w: World, number: int, loss: Tensor, x: Tensor) -> None:
    filename = w.path / "last.pt"
    is_best = loss.item() < w.best
    w.best = min(loss.item(), w.best)
    torch.save({"best": w.best, "model": w.net.state_dict()}, filename)
    if is_best:
        shutil.copyfile(filename, w.path / "best.pt")


def order(w: World, number: int, loss: Tensor, x: Tensor) -> None:
    w.args.n += 1
    w.losses.append(loss.item())
    torch.save([w.args, w.losses, w.net[0].weight, w.net[0].weight.grad], w.folder + "/a.pt")
    with torch.no_grad():
        w.net[0].weight.mul_(0.5)  # type: ignore[operator]
    w.args.n += 1
    torch.save((w.args, [w.net[0].weight.data, x, x]), f=w.folder + "/b.pt")


def folders(w: World, number: int, loss: Tensor, x: Tensor) -> None:
    folder = os.path.join(w.folder, "one")
    if not os.path.exists(folder):
        os.makedirs(folder)
    if (w.path / "stop.pt").is_file():
        w.found += 1
    (w.path / "two").mkdir(exist_ok=True)
    torch.save(number, folder + f"/{number}.pt")
    torch.save(number, w.path / "two" / "n.pt")
    if number >= 2:
        os.remove(folder + f"/{number - 2}.pt")
        torch.save(1, w.path / "stop.pt")


BODIES = {body.__name__: body for body in (checkpoint, best, order, folders)}


@pytest.mark.parametrize("name", BODIES)
def test_each_call_saves_what_eager_code_saves(name: str, tmp_path: Path) -> None:
    expected, _ = trained(BODIES[name], tmp_path / "eager", compiled=False)
    found, graphs = trained(BODIES[name], tmp_path / "captured", compiled=True)
    assert found == expected
    assert graphs <= 3 if name != "folders" else graphs <= 4


REFUSED: dict[str, tuple[Body, str]] = {
    "a model": (lambda w, n, loss, x: torch.save(w.net, w.folder + "/a.pt"), "what it updates"),
    "one within": (lambda w, n, loss, x: torch.save([w.holder], w.folder + "/a"), "what it upd"),
    "a set": (lambda w, n, loss, x: torch.save({1, n}, w.folder + "/a.pt"), "a set that it makes"),
    "behind": (
        lambda w, n, loss, x: [torch.save(n, w.folder + "/a"), os.path.exists(w.folder)].clear(),
        "looks for a file",
    ),
    "listing": (
        lambda w, n, loss, x: [glob.glob(w.folder + "/*"), torch.save(n, w.folder + "/a")].clear(),
        "asks about files",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_in_each_call_is_refused(name: str, tmp_path: Path) -> None:
    body, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason):
        trained(body, tmp_path / "captured", compiled=True)
    assert files_in(tmp_path / "captured") == []


def test_what_saving_raises_reaches_the_caller(tmp_path: Path) -> None:
    def body(w: World, number: int, loss: Tensor, x: Tensor) -> None:
        torch.save(number, w.folder + "/nowhere/a.pt")

    for compiled in (False, True):
        with pytest.raises(RuntimeError, match="Parent directory"):
            trained(body, tmp_path / str(compiled), compiled)
