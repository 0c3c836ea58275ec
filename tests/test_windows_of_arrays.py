"""Items and windows of numpy's arrays and files at places that the graph gives, of which tensors
are made: nanoGPT's `get_batch` within the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError

LENGTH = 60
Batch = Callable[[Any], Tensor]


def drawn(tokens: Any) -> Tensor:
    return torch.randint(len(tokens) - 9, (4,))


def nanogpt(tokens: Any) -> Tensor:
    places = drawn(tokens)
    x = torch.stack([torch.from_numpy(tokens[i : i + 8].astype(numpy.int64)) for i in places])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 9].astype(numpy.int64)) for i in places])
    return torch.stack([x, y])


def stacked(tokens: Any) -> Tensor:
    places = numpy.random.randint(0, len(tokens) - 9, size=4)
    return torch.from_numpy(numpy.stack([tokens[i : i + 9] for i in places]).astype(numpy.int64))


def stacked_of_graph(tokens: Any) -> Tensor:
    rows = [tokens[i : i + 9].astype(numpy.int64) for i in drawn(tokens).tolist()]
    return torch.from_numpy(numpy.stack(rows))


def at_once(tokens: Any) -> Tensor:
    places = numpy.random.randint(0, len(tokens) - 9, size=4)
    return torch.from_numpy(tokens[places[:, None] + numpy.arange(9)].astype(numpy.int64))


BATCHES: dict[str, Batch] = {
    "nanogpt": nanogpt,
    "stacked": stacked,
    "stacked of the graph": stacked_of_graph,
    "at once": at_once,
    "rows": lambda tokens: torch.tensor(tokens[drawn(tokens)].astype(numpy.int64)),
    "rows of an array": lambda tokens: torch.tensor(
        tokens[drawn(tokens).numpy()].astype(numpy.int64)
    ),
    "taken": lambda tokens: torch.tensor(
        numpy.take(numpy.arange(40), numpy.random.randint(0, 9, size=3)).astype(numpy.int64)
    ),
    "window": lambda tokens: torch.as_tensor(
        tokens[(i := drawn(tokens)[0].item()) : i + 8].astype(numpy.int64)
    ),
    "of Python": lambda tokens: torch.tensor(
        tokens[(i := random.randint(0, 40)) : i + 8].astype(numpy.int64)
    ),
    "to floats": lambda tokens: torch.from_numpy(
        tokens[drawn(tokens)].astype(numpy.float32)
    ).long(),
}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Callable[[], Any]]:
    tokens = numpy.random.RandomState(0).randint(0, 20, LENGTH).astype(numpy.uint16)
    file = tmp_path / "train.bin"
    tokens.tofile(file)
    mapped = numpy.memmap(file, dtype=numpy.uint16, mode="r")
    return {
        "array": lambda: tokens,
        "file": lambda: mapped,
        "opened in the step": lambda: numpy.memmap(file, dtype=numpy.uint16, mode="r"),
    }


def trained(
    batch: Batch, source: Callable[[], Any], wrap: Callable[[Any], Any]
) -> tuple[list[Tensor], Any]:
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(0)
    model = nn.Embedding(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @wrap
    def step() -> Tensor:
        x = batch(source())
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return x

    return [*(step() for _ in range(5)), *model.parameters()], step


@pytest.mark.parametrize("where", ["array", "file", "opened in the step"])
@pytest.mark.parametrize("batch", BATCHES)
def test_batches_are_eager_s_in_one_graph(
    batch: str, where: str, sources: dict[str, Callable[[], Any]]
) -> None:
    eager, _ = trained(BATCHES[batch], sources[where], lambda step: step)
    ours, step = trained(BATCHES[batch], sources[where], graphopt.compile)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    assert len(step.captures) == 1


@pytest.mark.parametrize("batch", ["nanogpt", "at once"])
def test_the_program_may_change_the_array(batch: str) -> None:
    found = []
    for wrap in (lambda step: step, graphopt.compile):
        tokens = numpy.random.RandomState(0).randint(0, 20, LENGTH)

        def source(tokens: Any = tokens) -> Any:
            return tokens

        torch.manual_seed(0)
        numpy.random.seed(0)
        model = nn.Embedding(20, 3)

        @wrap
        def step(model: nn.Module = model, source: Any = source) -> Tensor:
            x = BATCHES[batch](source())
            model(x).sum().backward()
            return x

        rows = []
        for _ in range(4):
            rows.append(step().clone())
            tokens[:] = (tokens + 1) % 20
        found.append(rows)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_window_of_another_length_is_another_graph() -> None:
    tokens, places = numpy.arange(20), torch.tensor([3, 17, 5, 17])
    model = nn.Embedding(20, 3)

    @graphopt.compile
    def step(i: Tensor) -> Tensor:
        x = torch.from_numpy(tokens[i : i + 5].astype(numpy.int64))
        model(x).sum().backward()
        model.zero_grad()
        return x

    for i in places:
        assert step(i).tolist() == tokens[i : i + 5].tolist()
    assert len(step.captures) == 2


def test_a_window_that_is_rounded_is_numpys() -> None:
    values = 5 + numpy.random.RandomState(0).rand(LENGTH)
    model = nn.Embedding(20, 3)

    def step(i: int) -> Tensor:
        window = values[i : i + 4]
        x = torch.from_numpy(window.astype(numpy.int64))
        model(x).sum().backward()
        model.zero_grad()
        return x

    compiled = graphopt.compile(lambda i: step(i.item()))
    for i in torch.tensor([3, 17, 5]):
        assert torch.equal(compiled(i), step(i.item()))


def test_what_cannot_be_exact_is_refused() -> None:
    values, kept = numpy.random.RandomState(0).randn(LENGTH), []
    model = nn.Embedding(20, 3)

    @graphopt.compile
    def step() -> None:
        model(torch.tensor([1])).sum().backward()
        kept.append(values[(i := drawn(values)[0]) : i + 2])

    with pytest.raises(CaptureError):
        step()


def test_a_call_that_waits_for_more_data_returns_early() -> None:
    """As the tutorial on deep Q-learning has it."""

    def trained(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        memory: list[Tensor] = []

        @wrap
        def optimize() -> Any:
            if len(memory) < 4:
                return None
            loss = model(torch.stack(random.sample(memory, 4))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        losses = []
        for _ in range(9):
            memory.append(torch.randn(3))
            losses.append(optimize())
        return [losses, [p.tolist() for p in model.parameters()]], optimize

    eager, _ = trained(lambda step: step)
    ours, step = trained(graphopt.compile)
    assert eager == ours
    assert len(step.captures) <= 3


def test_a_text_is_padded_to_a_length() -> None:
    """A progress bar."""
    model, written = nn.Linear(2, 1), []

    @graphopt.compile
    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        text = f"loss {loss.item():.3f}"
        for _ in range(20 - len(text)):
            text += "."
        written.append("".join([text[:-1], str(loss.item())[:0], text[-1]]))

    for scale in (1.0, 30.0, 2.0):
        step(torch.full((2, 2), scale))
    assert [len(text) for text in written] == [20, 20, 20]
    assert len(set(written)) == 3
