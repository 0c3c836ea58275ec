"""What a step may not keep of its values, and what a callback may not do. Each step marks the line
that its error has to name with `# HERE`."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import json
import logging
import math
import pickle
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import graphopt
from refusal import fresh, refused
from twins import World
from zoo import MLP, MODELS

CASE = MODELS["mlp"]
Keep = Callable[[Tensor, Any], None]

history: list[Any] = []
table: dict[str, Any] = {}
numbers = numpy.zeros(3)
objects = numpy.zeros(3, dtype=object)
single = array.array("f")
ends: collections.deque[Any] = collections.deque()
waiting: queue.Queue[Any] = queue.Queue()
values: set[Any] = set()
latest: Any = None


class Writer:
    """Something that keeps what it is given, as text or as it is."""

    last: Any = None

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add_scalar(self, tag: str, value: Any, number: int) -> None:
        self.rows.append((tag, value, number))

    def add_text(self, value: Any) -> None:
        self.rows.append(f"{value}")


writer = Writer()


def in_a_global(loss: Tensor, rate: Any) -> None:
    global latest
    latest = loss.item()


def swallowed(loss: Tensor, rate: Any) -> None:
    with contextlib.suppress(Exception):
        history.append(f"{loss.item()}")  # HERE


def set_attribute(owner: Any, value: Any) -> None:
    owner.last = value


KEPT: dict[str, Keep] = {
    "queue": lambda loss, rate: waiting.put(-loss.item()),  # HERE
    "set": lambda loss, rate: values.add(loss.item()),  # HERE
    "array of floats": lambda loss, rate: numbers.__setitem__(0, loss.item()),  # HERE
    "array of objects": lambda loss, rate: objects.__setitem__(0, loss.item()),  # HERE
    "array": lambda loss, rate: single.append(loss.item()),  # HERE
    "closure": lambda loss, rate: history.append(partial(print, loss.item())),  # HERE
    "generator": lambda loss, rate: history.append(x for x in [loss.item()]),  # HERE
    "JSON of the learning rate": lambda loss, rate: history.append(json.dumps([rate])),  # HERE
    "hash of the learning rate": lambda loss, rate: history.append(hash(rate)),  # HERE
    "fraction of the learning rate": lambda loss, rate: history.append(rate.hex()),  # HERE
    "tensor": lambda loss, rate: values.add(loss.detach()),  # HERE
    "swallowed": swallowed,
    "list": lambda loss, rate: history.append(loss.item()),  # HERE
    "several": lambda loss, rate: history.extend([loss.item(), 3]),  # HERE
    "several of a queue": lambda loss, rate: ends.extend((rate, "text")),  # HERE
    "list of a list": lambda loss, rate: history.append(loss.reshape(1).tolist()),  # HERE
    "writer": lambda loss, rate: writer.add_scalar("loss", loss.item(), 3),  # HERE
    "deque": lambda loss, rate: ends.append(loss.item() * 2),  # HERE
    "copy": lambda loss, rate: history.append(copy.deepcopy(loss.item())),  # HERE
    "integer": lambda loss, rate: history.append((loss > 0).sum().item() + 1),  # HERE
    "quotient": lambda loss, rate: history.append((loss > 0).sum().item() / 3),  # HERE
    "truth": lambda loss, rate: history.append((loss > 0).item()),  # HERE
    "comparison": lambda loss, rate: history.append(loss.item() > 3),  # HERE
    "magnitude": lambda loss, rate: history.append(abs(loss.item())),  # HERE
    "rounded": lambda loss, rate: history.append(round(loss.item())),  # HERE
    "root": lambda loss, rate: history.append(math.sqrt(loss.item())),  # HERE
    "learning rate": lambda loss, rate: history.append(rate),  # HERE
    "rounded learning rate": lambda loss, rate: history.append(round(rate, 3)),  # HERE
    "learning rate as a float": lambda loss, rate: history.append(float(rate)),  # HERE
    "writer of text": lambda loss, rate: writer.add_text(loss.item()),  # HERE
    "text of a list": lambda loss, rate: history.append(str([loss.item()])),  # HERE
    "JSON": lambda loss, rate: history.append(json.dumps({"loss": loss.item()})),  # HERE
    "text of the learning rate": lambda loss, rate: history.append(f"{rate}"),  # HERE
    "text with the learning rate": lambda loss, rate: history.append(f"rate {rate:.2e}"),  # HERE
    "repr of the learning rate": lambda loss, rate: history.append(repr(rate / 2)),  # HERE
    "format of the learning rate": lambda loss, rate: history.append(format(rate, ".3f")),  # HERE
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_value_that_is_kept(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    keep = KEPT[kept]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        keep(loss, optimizer.param_groups[0]["lr"])
        loss.backward()
        optimizer.step()

    w = fresh(step)
    with pytest.raises(graphopt.CaptureError) as caught:
        graphopt.compile(step, pipeline="none")(w.model, w.optimizer, *CASE.batch(0))
    error = str(caught.value)
    assert "graphopt.callback" in error and "test_callback_refused.py:" in error
    line = str(caught.value.location).split("  ", 1)[1]
    assert "# HERE" in line
    forget()


KEPT_IN_EACH_CALL: dict[str, Keep] = {
    "item of a dict": lambda loss, rate: table.update(loss=loss.item()),
    "float": lambda loss, rate: table.update(loss=float(loss.detach())),
    "attribute": lambda loss, rate: set_attribute(writer, loss.item()),
    "class attribute": lambda loss, rate: set_attribute(Writer, loss.item()),
    "global": in_a_global,
    "integer": lambda loss, rate: table.update(loss=(loss > 0).sum().item() + 1),
    "quotient": lambda loss, rate: table.update(loss=(loss > 0).sum().item() / 3),
    "comparison": lambda loss, rate: table.update(loss=loss.item() > 3),
    "rounded": lambda loss, rate: table.update(loss=round(loss.item())),
    "root": lambda loss, rate: table.update(loss=math.sqrt(loss.item())),
    "learning rate": lambda loss, rate: table.update(rate=rate),
    "rounded learning rate": lambda loss, rate: table.update(rate=round(rate, 3)),
    "tensor": lambda loss, rate: table.update(loss=loss.detach()),
}


@pytest.mark.parametrize("kept", KEPT_IN_EACH_CALL)
def test_a_value_that_each_call_keeps(kept: str) -> None:
    keep = KEPT_IN_EACH_CALL[kept]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        keep(loss, optimizer.param_groups[0]["lr"])
        loss.backward()
        optimizer.step()

    found = []
    for run in (step, graphopt.compile(step)):
        forget()
        w = fresh(step)
        for number in range(4):
            run(w.model, w.optimizer, *CASE.batch(number))
            w.optimizer.param_groups[0]["lr"] *= 0.5
            found.append(repr((history, table, ends, writer.rows, writer.last, latest)))
    forget()
    assert found[:4] == found[4:]
    if kept not in ("quotient", "rounded"):  # which are the same in each call
        assert found[0] != found[1]
    assert len(run.captures) == 1


def forget() -> None:
    global latest
    latest = Writer.last = None
    vars(writer).pop("last", None)
    for container in (history, table, ends, values, writer.rows):
        container.clear()  # type: ignore[attr-defined]
    objects[:] = 0


class Trainer:
    """An object among the arguments."""

    def __init__(self) -> None:
        self.last: Any = None
        self.history: list[Any] = []
        self.values: set[Any] = set()


@pytest.mark.parametrize(
    "keep",
    [
        lambda trainer, loss: trainer.values.add(loss.detach()),  # HERE
        lambda trainer, loss: trainer.values.add(loss.item()),  # HERE
    ],
)
def test_a_value_in_an_object_among_the_arguments(keep: Callable[..., None]) -> None:
    def step(
        model: nn.Module, optimizer: Optimizer, trainer: Trainer, x: Tensor, y: Tensor
    ) -> None:
        loss = F.cross_entropy(model(x), y)
        keep(trainer, loss)
        loss.backward()
        optimizer.step()

    w = fresh(step)
    trainer = Trainer()
    with pytest.raises(graphopt.CaptureError, match="# HERE") as caught:
        graphopt.compile(step)(w.model, w.optimizer, trainer, *CASE.batch(0))
    assert "graphopt.callback" in str(caught.value)
    assert not trainer.history and not trainer.values


def test_numbers_that_stay_in_the_step_are_captured() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * ctx.factor, None

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        seen = [loss.item(), abs(loss.item())]
        scaled = Scaled.apply(loss, seen[0] + seen[1])
        scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        return scaled

    captured, eager = fresh(step), fresh(step)
    compiled = graphopt.compile(step)
    for i in range(3):
        expected = step(eager.model, eager.optimizer, *CASE.batch(i))
        assert torch.equal(compiled(captured.model, captured.optimizer, *CASE.batch(i)), expected)


# What a callback's function holds


def step_with(make: Callable[[Tensor, Tensor], Callable[..., Any]]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y)
        graphopt.callback(make(loss, x), loss)  # HERE
        loss.backward()
        optimizer.step()

    return step


def test_a_function_that_holds_a_value_of_the_step() -> None:
    holding: list[Callable[[Tensor, Tensor], Callable[..., Any]]] = [
        lambda loss, x: lambda value: history.append(loss),
        lambda loss, x: lambda value: history.append(x),
        lambda loss, x: partial(print, loss.item()),
        lambda loss, x: [loss].append,
    ]
    for make in holding:
        step = step_with(make)
        assert "not given" in str(refused(step, fresh(step)))


def test_a_function_that_holds_what_the_step_makes() -> None:
    for made in (list, dict, Writer):
        step = step_with(lambda loss, x, made=made: partial(print, made()))
        assert "graphopt.callback holds" in str(refused(step, fresh(step)))


# What a callback's function does


def reading() -> dict[str, Callable[[World, list[Tensor]], Any]]:
    """Ways to read or write state; the list was made before, and so was the view at its end."""
    return {
        "state_dict": lambda w, held: w.model.state_dict(),
        "parameters": lambda w, held: [p.sum() for p in w.model.parameters()],
        "forward": lambda w, held: w.model(CASE.batch(0)[0]),
        "held": lambda w, held: held[0].norm(),
        "view": lambda w, held: held[-1].sum(),
        "in place": lambda w, held: held[0].data.clamp_(0),
        "deepcopy": lambda w, held: copy.deepcopy(w.model),
        "gradient": lambda w, held: held[0].grad,
        "optimizer": lambda w, held: [
            v.sum() for s in w.optimizer.state.values() for v in s.values()
        ],
        "list operator": lambda w, held: torch._foreach_norm(held),
        "numpy": lambda w, held: held[0].detach().numpy(),
        "item": lambda w, held: held[0].flatten()[0].item(),
        "text": lambda w, held: repr(held[0]),
    }


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("name", reading())
def test_state_that_a_function_is_not_given(name: str, pipeline: str) -> None:
    read, w = reading()[name], fresh()
    held = [*w.model.parameters(), next(w.model.parameters()).data.view(-1)]
    step = step_with(lambda loss, x, read=read, w=w, held=held: lambda value: read(w, held))
    compiled = graphopt.compile(step, pipeline=pipeline)
    with pytest.raises(graphopt.GraphOptError, match="give it the tensor"):
        compiled(w.model, w.optimizer, *CASE.batch(0))


def test_what_a_function_may_read() -> None:
    w = fresh()
    held = list(w.model.parameters())
    seen: list[Any] = []
    rate = lambda value: seen.append((w.optimizer.param_groups[0]["lr"], held[0].shape))  # noqa: E731
    step = step_with(lambda loss, x: rate)
    graphopt.compile(step)(w.model, w.optimizer, *CASE.batch(0))
    assert seen == [(w.optimizer.param_groups[0]["lr"], held[0].shape)]


class Boom(Exception):
    """Raised by a callback."""


def failing(where: str, number: int) -> Callable[..., Any]:
    counted = iter(range(100))

    def log(value: Tensor) -> None:
        if next(counted) == number:
            raise Boom("no space left on device")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if where == "early":
            graphopt.callback(log, loss)
        loss.backward()
        if where == "before the updates":
            graphopt.callback(log, loss)
        optimizer.step()
        if where == "last":
            graphopt.callback(log, loss)
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("pipeline", ["none", "default"])
@pytest.mark.parametrize("where", ["early", "before the updates", "last"])
def test_an_exception(where: str, pipeline: str) -> None:
    """It ends the step where it ends it in eager code; later steps go on."""
    results = []
    for compiled in (False, True):
        w = fresh()
        step = failing(where, 3)
        called = graphopt.compile(step, pipeline=pipeline) if compiled else step
        for i in range(6):
            if i != 3:
                called(w.model, w.optimizer, *CASE.batch(i))
                continue
            with pytest.raises(Boom, match="no space left") as caught:
                called(w.model, w.optimizer, *CASE.batch(i))
            assert caught.traceback[-1].name == "log"
            w.optimizer.zero_grad()
        results.append([p.detach().clone() for p in w.model.parameters()])
    assert all(map(torch.equal, *results))
    assert isinstance(fresh().model, MLP)


def test_a_checkpoint_is_saved_by_a_function_that_every_step_calls(tmp_path: Any) -> None:
    """As the refusal of a step says that pickles tensors itself."""
    model, path = nn.Linear(3, 1), tmp_path / "model.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    @graphopt.compile
    def saves(x: Tensor) -> None:
        train(x)
        path.write_bytes(pickle.dumps(model.state_dict()))

    @graphopt.compile
    def lets_save(x: Tensor) -> None:
        train(x)
        graphopt.callback(torch.save, model.state_dict(), path)

    with pytest.raises(graphopt.CaptureError, match="writes to a file"):
        saves(torch.ones(2, 3))
    for _ in range(2):
        lets_save(torch.ones(2, 3))
        assert torch.equal(torch.load(path)["weight"], model.weight)
