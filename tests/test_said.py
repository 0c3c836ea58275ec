"""What a step says to the outside: it does so in each call, as eager code, in the same order."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

Effect = Callable[[Any, Tensor], Any]


class Meter:
    """A running average that says what it is."""

    def __init__(self) -> None:
        self.total, self.count, self.queue = 0.0, 0, deque[float](maxlen=3)

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.queue.append(value)

    def __str__(self) -> str:
        return f"{np.mean(self.queue):.4f} ({self.total / self.count:.4f})"


def prints(said: Any, loss: Tensor) -> None:
    said.meter.update(loss.item())
    said.rows.append(loss.item())
    print(f"loss {loss.item():.4f}", said.meter, {"loss": loss.item()}, said.rows, loss.detach())
    print(said.optimizer.param_groups[0]["lr"], end="|\n", sep="-")
    print(f"{np.mean(said.rows[-2:]):.3f}", len(said.rows), said.rows[-1], said.table)
    said.table["loss"] = loss.item()


def prints_at_times(said: Any, loss: Tensor) -> None:
    said.count += 1
    if said.count % 2 == 0:
        print(f"Epoch {1} [{said.count}/{9}]\tLoss: {loss.item():.6f}")
    if loss.item() < said.best:
        said.best = loss.item()
        print(f"new best {said.best:.5f}")


def logs(said: Any, loss: Tensor) -> None:
    said.logger.info("loss %.3f", loss.item())
    said.logger.warning(f"loss {loss.item():.2f} of {said.count}")
    said.logger.debug("nobody reads %s", loss.item())


def writes(said: Any, loss: Tensor) -> Any:
    said.table_writer.writerow([said.count, loss.item()])
    said.file.write(f"{loss.item():.5f}\n")
    said.count += 1
    return said.file.write(f"{loss.item():.2f}")


def shows_progress(said: Any, loss: Tensor) -> None:
    said.bar.set_description(f"loss {loss.item():.4f}")
    said.bar.set_postfix(loss=loss.item(), lr=said.optimizer.param_groups[0]["lr"])
    said.bar.update(1)


def run(effect: Effect, compiled: bool, capture: pytest.CaptureFixture[str]) -> list[str]:
    """What each call says, gives and leaves."""
    tqdm = pytest.importorskip("tqdm")
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    stream, shown = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(filename)s:%(lineno)d %(funcName)s %(message)s"))
    said = SimpleNamespace(rows=[], table={}, count=0, best=1.0, meter=Meter(), file=io.StringIO())
    said.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said.logger = logging.Logger("said", logging.INFO)
    said.logger.addHandler(handler)
    rows = io.StringIO()
    said.table_writer = csv.writer(rows)
    options: dict[str, Any] = {"mininterval": 0, "miniters": 1}
    said.bar = tqdm.tqdm(total=9, file=shown, bar_format="{desc}{n_fmt}{postfix}", **options)

    def step(x: Tensor) -> Any:
        said.optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        given = effect(said, loss)
        said.optimizer.step()
        return loss.detach(), given

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for x in torch.randn(5, 3, 4):
        given = repr(used(x))
        streams = (capture.readouterr().out, stream, rows, said.file, shown)
        texts = [each if isinstance(each, str) else each.getvalue() for each in streams]
        found.append(f"{given} {texts} {said.rows} {said.table} {said.count} {said.best}")
    return [*found, repr(model.weight)]


@pytest.mark.parametrize("effect", [prints, prints_at_times, logs, writes, shows_progress])
def test_each_call_says_what_eager_code_says(
    effect: Effect, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(effect, False, capsys)
    assert run(effect, True, capsys) == expected


def shows_gradient_functions(model: nn.Linear, loss: Tensor, kept: SimpleNamespace) -> None:
    rows = model.weight * 2
    print(loss, [rows, {"loss": (loss, 1)}], sep="|")
    print(f"{loss!r} {loss:.3f} {rows}", f"{loss} {loss:.2f}", rows[0], rows.t())
    logging.getLogger("said").info("loss %s %f", loss, loss)
    kept.text = str(rows.exp())


def test_a_tensor_is_shown_with_its_gradient_function(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def run(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        model, kept, found = nn.Linear(2, 2), SimpleNamespace(), []

        def step(x: Tensor) -> None:
            loss = model(x).pow(2).mean()
            shows_gradient_functions(model, loss, kept)
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)

        taken = graphopt.compile(step) if compiled else step
        for _ in range(3):
            with caplog.at_level("INFO"):
                caplog.clear()
                taken(torch.randn(3, 2))
            mine = [each.getMessage() for each in caplog.records if each.name == "said"]
            found += [capsys.readouterr().out, kept.text, mine]
        return found

    assert "grad_fn=<MeanBackward0>" in (expected := run(False))[0]
    assert run(True) == expected


@pytest.mark.parametrize("what", ["parameter", "list outside"])
def test_what_else_autograd_knows_of_a_tensor_is_not_shown(what: str) -> None:
    weight, losses = nn.Parameter(torch.ones(2)), list[Tensor]()

    @graphopt.compile
    def step(x: Tensor) -> None:
        loss = (weight * x).sum()
        losses.append(loss)
        print(weight if what == "parameter" else losses)
        loss.backward()

    with pytest.raises(CaptureError, match="autograd knows" if what == "parameter" else "outside"):
        step(torch.ones(2))


def redirected(text: io.StringIO, loss: Tensor) -> None:
    with contextlib.redirect_stdout(text):
        print(loss.item())


def exchanged(text: io.StringIO, loss: Tensor) -> None:
    shown_on, sys.stdout = sys.stdout, text
    try:
        print(loss.item())
    finally:
        sys.stdout = shown_on


@pytest.mark.parametrize("show", [redirected, exchanged])
def test_a_step_that_shows_something_elsewhere_is_refused(
    show: Callable[[io.StringIO, Tensor], None],
) -> None:
    weight = nn.Parameter(torch.ones(2))

    @graphopt.compile
    def step(x: Tensor) -> str:
        loss = (weight * x).sum()
        loss.backward()
        show(text := io.StringIO(), loss)
        return text.getvalue()

    with pytest.raises(CaptureError, match=r"another file in place of sys.stdout.*\n.*print"):
        step(torch.ones(2))


def test_what_a_program_shows_elsewhere_is_shown_there() -> None:
    weight = nn.Parameter(torch.ones(2))

    @graphopt.compile
    def step(x: Tensor) -> None:
        loss = (weight * x).sum()
        loss.backward()
        print(loss.item())

    with contextlib.redirect_stdout(io.StringIO()) as text:
        for scale in range(3):
            step(torch.ones(2) * scale)
    assert text.getvalue() == "0.0\n2.0\n4.0\n"


def test_warnings_are_given_at_capture() -> None:
    def step(x: Tensor) -> Tensor:
        warnings.warn("a small batch", stacklevel=1)
        return x * 2

    compiled = graphopt.compile(step, pipeline="none")
    for number in range(3):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("default")
            compiled(torch.ones(2))
        assert [str(each.message) for each in given] == ["a small batch"] * (number == 0)
