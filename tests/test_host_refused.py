"""Work on the host that a step does: refused where it stands, with nothing changed, and the cures
that the message names are captured and equal to eager code."""

from __future__ import annotations

import glob
import json
import os
import pickle
import random
import secrets
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import graphopt

RNG, NUMPY_RNG, NUMPY_STATE = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)

DRAWS: list[Callable[[], Any]] = [
    lambda: random.random(),
    lambda: random.gauss(0, 1),
    lambda: random.choice([1.0, 2.0]),
    lambda: random.sample(range(9), 2)[0],
    lambda: random.shuffle([1, 2]) or 1,
    lambda: random.Random.random(RNG),
    lambda: RNG.uniform(0, 1),
    lambda: random.Random().random(),
    lambda: next(map(random.uniform, [0], [1])),
    lambda: np.random.rand(),
    lambda: np.random.normal(0, 1, 3).sum(),
    lambda: np.random.permutation(3)[0],
    lambda: NUMPY_RNG.normal(),
    lambda: NUMPY_STATE.randint(3),
    lambda: np.random.default_rng().random(),
    lambda: secrets.randbelow(9),
    lambda: os.urandom(1)[0],
    lambda: uuid.uuid4().int % 7,
    lambda: drawn_by_a_library(),
]


def drawn_by_a_library() -> float:
    """The draw stands in a function of a library that is not followed."""
    return float(torch.utils.data.random_split(range(4), [0.5, 0.5])[0].indices[0])


READS: list[Callable[[Path], Any]] = [
    lambda path: len(open(path / "text.json").read()),  # noqa: SIM115
    lambda path: json.loads((path / "text.json").read_text())[0],
    lambda path: (path / "text.json").read_bytes()[0],
    lambda path: np.load(path / "array.npy")[0],
    lambda path: np.fromfile(path / "array.npy")[0],
    lambda path: np.memmap(path / "array.npy", mode="r")[0],
    lambda path: pickle.loads((path / "pickle").read_bytes()),
    lambda path: torch.load(path / "tensor")[0],
    lambda path: os.stat(path).st_size,
    lambda path: os.path.getsize(path),
    lambda path: (path / "text.json").stat().st_size,
    lambda path: len(os.listdir(path)),
    lambda path: len(list(path.iterdir())),
    lambda path: len(list(os.walk(path))),
    lambda path: len(glob.glob(f"{path}/*")),
    lambda path: len(subprocess.check_output(["echo", "1"])),
    lambda path: subprocess.run(["true"], check=False).returncode,
    lambda path: os.system("true"),
    lambda path: os.getloadavg()[0],
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "text.json").write_text("[1.0]")
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "pickle").write_bytes(pickle.dumps(1.0))
    torch.save(torch.ones(1), tmp_path / "tensor")
    return tmp_path


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy["key"].tolist(), torch.get_rng_state().tolist()


def refused(step: Callable[..., Any], what: str, *args: Any) -> None:
    """The step is refused at the line of this file that is marked, and nothing has changed."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in model.parameters()]
    states = _states()
    compiled = graphopt.compile(step)
    for _ in range(2):
        with pytest.raises(graphopt.CaptureError, match=what) as caught:
            compiled(model, optimizer, torch.ones(2, 3), *args)
        text = str(caught.value)
        assert f"{__file__}:" in text and "hint:" in text and caught.value.hint
    assert _states() == states
    assert all(map(torch.equal, before, model.parameters()))
    assert len(compiled.captures) == 0


@pytest.mark.parametrize("number", range(len(DRAWS) - 1))
def test_draws_are_refused(number: int) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        return trained(model, optimizer, x * float(DRAWS[number]()))

    refused(step, "draws from a generator")


def test_a_refused_draw_may_not_be_swallowed() -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        try:
            x = x * random.random()
        except Exception:
            x = x * 2
        return trained(model, optimizer, x)

    refused(step, "draws from a generator")


def test_what_is_drawn_from_a_seed_of_the_step_is_a_constant() -> None:
    def step(x: Tensor) -> Tensor:
        return x * random.Random(3).random() + float(np.random.default_rng(3).normal())

    compiled = graphopt.compile(step)
    for x in (torch.ones(2), torch.zeros(2)):
        assert torch.equal(compiled(x), step(x))
    assert len(compiled.captures) == 1


@pytest.mark.parametrize("number", range(len(READS)))
def test_reads_of_files_and_processes_are_refused(number: int, files: Path) -> None:
    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        return trained(model, optimizer, x * float(READS[number](files)))

    refused(step, "reads from a file")


def test_a_file_that_is_open_is_refused_and_stays_where_it_is(files: Path) -> None:
    with open(files / "text.json") as file:
        readers: list[Callable[[], Any]] = [
            lambda: json.load(file)[0],
            lambda: len(file.read()),
            lambda: len(file.readline()),
            lambda: sum(len(line) for line in file),
        ]
        for read in readers:

            def step(model: Any, optimizer: Any, x: Tensor, read: Any) -> Tensor:
                return trained(model, optimizer, x * float(read()))

            refused(step, "reads from a file|an iterator", read)
            assert file.tell() == 0


def test_modules_may_be_imported() -> None:
    def step(x: Tensor) -> Tensor:
        import colorsys

        return x * colorsys.ONE_THIRD

    assert torch.equal(graphopt.compile(step)(torch.ones(2)), step(torch.ones(2)))


class Loop:
    """A program with iterators of its own, and a scheduler."""

    def __init__(self) -> None:
        data = [torch.full((3,), float(i)) for i in range(64)]
        self.loader: Any = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        self.batches = iter(self.loader)
        self.made = (each for each in data)
        self.items = iter(data)


ITERATORS: list[Callable[[Loop], Any]] = [
    lambda loop: next(loop.batches),
    lambda loop: loop.batches.__next__(),
    lambda loop: next(loop.made),
    lambda loop: next(loop.items),
    lambda loop: next(iter(loop.loader)),
    lambda loop: next(b for _, b in enumerate(loop.loader)),
    lambda loop: [*loop.loader][-1],
    lambda loop: next(zip(loop.items, range(3), strict=False))[0],
    lambda loop: next(batch for batch in loop.batches),
    lambda loop: next(loop.items, None),
    lambda loop: loop.made.send(None),
]


@pytest.mark.parametrize("number", range(len(ITERATORS)))
def test_iterators_are_refused_and_stay_where_they_are(number: int) -> None:
    loop = Loop()

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        return trained(model, optimizer, x + ITERATORS[number](loop).mean())

    refused(step, "an iterator outside its arguments")
    assert next(loop.items).sum() == 0 and next(loop.made).sum() == 0
    assert next(loop.batches).sum() == 3


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_is_refused_and_may_be_stepped_behind_the_call(make: Any) -> None:
    made: list[Any] = []

    def inside(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = trained(model, optimizer, x)
        made[0].step(*loss_of(loss))
        return loss

    def loss_of(loss: Tensor) -> list[Tensor]:
        return [loss] if "Plateau" in type(made[0]).__name__ else []

    model = nn.Linear(3, 3)
    made[:] = [make(torch.optim.SGD(model.parameters(), lr=0.1))]
    refused(inside, "steps a scheduler")

    def losses(run: Callable[..., Tensor]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made[:] = [make(optimizer)]
        found = []
        for _ in range(4):
            loss = run(model, optimizer, torch.ones(2, 3))
            made[0].step(*loss_of(loss))
            found.append((loss.item(), optimizer.param_groups[0]["lr"]))
        return [*found, *(each.tolist() for each in model.parameters())]

    compiled = graphopt.compile(trained)
    assert losses(compiled) == losses(trained)
    assert len(compiled.captures) <= 2  # of momentum that is set where there was none


def test_an_array_among_the_arguments_is_refused_and_may_be_a_tensor() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, weights: Any) -> Tensor:
        return trained(model, optimizer, x * torch.as_tensor(weights).mean())

    refused(step, "from_numpy", np.ones(3))
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = graphopt.compile(step)
    for number in range(3):
        compiled(model, optimizer, torch.ones(2, 3), torch.from_numpy(np.full(3, number)) * 1.0)
    assert len(compiled.captures) == 1


def test_the_cures_of_a_draw() -> None:
    def given(x: Tensor, scale: float) -> Tensor:
        return x * scale

    compiled = graphopt.compile(given)
    for scale in (0.1, 0.7, 0.3):
        assert torch.equal(compiled(torch.ones(2), scale), given(torch.ones(2), scale))
    assert len(compiled.captures) == 1

    def drawn_by_torch(x: Tensor) -> Tensor:
        return x * torch.rand(()).item() if torch.rand(()).item() < 0.5 else x

    compiled = graphopt.compile(drawn_by_torch)
    torch.manual_seed(0)
    eager = [drawn_by_torch(torch.ones(2)) for _ in range(6)]
    torch.manual_seed(0)
    assert all(torch.equal(compiled(torch.ones(2)), each) for each in eager)


def test_draws_in_a_callback_are_the_programs() -> None:
    drawn: list[float] = []

    def step(x: Tensor) -> Tensor:
        graphopt.callback(lambda: drawn.append(random.random()))
        return x * 2

    compiled = graphopt.compile(step)
    random.seed(0)
    for _ in range(3):
        compiled(torch.ones(2))
    random.seed(0)
    assert drawn == [random.random() for _ in range(3)]
