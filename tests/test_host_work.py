"""Work on the host in a step is refused with its line and the cure, whatever it is; and following
the cure gives what eager code gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphopt
from graphopt.errors import CaptureError
from host_work_cases import ARRAYS, CHANGES, CLOCKS, HISTORY, SHOWN, TEXTS, Program, Work

KINDS = {
    "change": (CHANGES, "outside its arguments"),
    "text": (TEXTS, "makes a text"),
    "shown": (SHOWN, "prints|a log|warns|to a file"),
    "clock": (CLOCKS, "reads a clock"),
    "array": (ARRAYS, "an array of numpy's|outside its arguments"),
}
ALL = [
    pytest.param(work, pattern, id=f"{kind}{number}")
    for kind, (works, pattern) in KINDS.items()
    for number, work in enumerate(works)
]


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    HISTORY.clear()


@pytest.mark.parametrize(("work", "pattern"), ALL)
def test_refused_with_its_line_and_nothing_left(work: Work, pattern: str, tmp_path: Path) -> None:
    p = Program(tmp_path)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = p.train(x)
        work(p, loss)
        return loss

    before = p.left()
    with pytest.raises(CaptureError, match=pattern) as caught:
        step(torch.ones(3, 2))
    assert p.left() == before
    text = str(caught.value)
    assert "host_work_cases.py" in text and "which would happen at capture only" in text
    assert "graphopt.callback(" in text and ("return" in text or "argument" in text)


def inline(p: Program) -> Callable[[Work, Tensor], None]:
    def run(work: Work, x: Tensor) -> None:
        work(p, p.train(x))

    return run


def behind_the_call(p: Program) -> Callable[[Work, Tensor], None]:
    step = graphopt.compile(p.train)

    def run(work: Work, x: Tensor) -> None:
        work(p, step(x))

    return run


def by_callback(p: Program) -> Callable[[Work, Tensor], None]:
    @graphopt.compile
    def step(work: Work, x: Tensor) -> None:
        loss = p.train(x)
        graphopt.callback(work, p, loss)

    return step


def left_by(
    cure: Callable[[Program], Callable[[Work, Tensor], None]],
    work: Work,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> list[Any]:
    folder.mkdir()
    p = Program(folder)
    run = cure(p)
    for i in range(3):
        run(work, torch.full((3, 2), i + 1.0))
    found = [*p.left(), *capsys.readouterr()]
    HISTORY.clear()
    return found


SHOWN_LATER = [param for param in ALL if "clock" not in str(param.id)]


@pytest.mark.parametrize(("work", "pattern"), SHOWN_LATER)
@pytest.mark.filterwarnings("ignore:a warning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_each_cure_gives_what_eager_code_gives(
    work: Work, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable()
    try:
        expected = left_by(inline, work, tmp_path / "eager", capsys)
        for cure in (behind_the_call, by_callback):
            assert left_by(cure, work, tmp_path / cure.__name__, capsys) == expected
    finally:
        logging.disable(logging.NOTSET)


def test_a_number_is_passed_as_an_argument(tmp_path: Path) -> None:
    """What a step would read on the host: here from an iterator, as from a file or a clock."""
    losses = []
    for captured in (False, True):
        p = Program(tmp_path)

        def train(x: Tensor, scale: float, p: Program = p) -> Tensor:
            return p.train(x * scale)

        step = graphopt.compile(train) if captured else train
        losses.append([step(torch.ones(3, 2), float(next(p.numbers))).item() for _ in range(4)])
    assert losses[0] == losses[1]


def test_an_error_of_the_step_says_what_eager_code_says(tmp_path: Path) -> None:
    p = Program(tmp_path)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss = p.train(x)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}")
        return loss

    step(torch.ones(3, 2))
    with pytest.raises(ValueError, match="the loss is nan"):
        step(torch.full((3, 2), float("nan")))


def test_what_a_package_shows_is_let_through_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "shows_what_it_does.py"
    package.parent.mkdir()
    package.write_text(
        "import logging, warnings\n"
        "def compute(x):\n"
        "    print('shown')\n"
        "    logging.getLogger('a package').warning('logged')\n"
        "    warnings.warn('warned')\n"
        "    return x * 2\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    compute = __import__("shows_what_it_does").compute
    step = graphopt.compile(lambda x: compute(x) + 1)
    with pytest.warns(UserWarning, match="warned"):
        assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    shown = capsys.readouterr().out
    assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert "shown" in shown and capsys.readouterr().out == ""
