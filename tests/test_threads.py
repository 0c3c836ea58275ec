"""What other threads do while a step is captured, and steps that are captured and run at once."""

from __future__ import annotations

import contextlib
import copy
import queue
import random
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import graphopt
from graphopt._compat.threads import taking_turns
from graphopt.errors import CaptureError
from work_in_threads import KINDS, STEPS, Beside, model, train, trained

ROUNDS = 50
"""How many captures the whole run has beside each kind of work."""


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _check_beside(kind: str, rounds: int) -> None:
    steps = STEPS[:1] if kind == "autocast" else STEPS
    eager = [trained(number, captured=False, steps=steps) for number in range(rounds)]
    with Beside(KINDS[kind]()) as beside:
        captured = [trained(number, captured=True, steps=steps) for number in range(rounds)]
    assert not beside.errors
    assert all(map(_same, captured, eager))
    alone = KINDS[kind]()
    assert all(_same(found, alone()) for found in beside.results)
    assert beside.results


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_work_as_alone(kind: str) -> None:
    _check_beside(kind, 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_work_as_alone_in_many_captures(kind: str) -> None:
    _check_beside(kind, ROUNDS)


def _check_at_once(steps: int, rounds: int) -> None:
    for one in range(rounds):
        numbers = range(one, one + steps)
        found: dict[int, list[torch.Tensor]] = {}
        errors: list[BaseException] = []
        together = threading.Barrier(steps)

        def run(
            number: int,
            found: dict[int, list[torch.Tensor]] = found,
            errors: list[BaseException] = errors,
            together: threading.Barrier = together,
        ) -> None:
            together.wait(60)
            try:
                found[number] = trained(number, captured=True)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
        assert not errors
        assert all(_same(found[number], trained(number, captured=False)) for number in numbers)


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_captured_and_run_at_once(steps: int) -> None:
    _check_at_once(steps, 1)


@pytest.mark.full
@pytest.mark.parametrize("steps", [2, 4])
def test_steps_captured_and_run_at_once_many_times(steps: int) -> None:
    _check_at_once(steps, ROUNDS)


class Trainer:
    """Another thread puts batches into a queue of it, and notes them."""

    def __init__(self) -> None:
        self.net, x = model(1)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.batches = [x * number for number in range(1, 9)]
        self.queue: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)
        self.noted: list[int] = []

    def fill(self) -> None:
        for number, x in enumerate(self.batches):
            self.noted.append(number)
            self.queue.put(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return train(self.net, self.optimizer, x)

    def losses(self, step: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        thread = threading.Thread(target=self.fill)
        thread.start()
        found = [step(self.queue.get(timeout=60)).item() for _ in self.batches]
        thread.join()
        return found


def test_a_queue_of_the_trainer_that_another_thread_fills() -> None:
    eager, trainer = Trainer(), Trainer()
    expected = eager.losses(eager.step)
    assert trainer.losses(graphopt.compile(trainer.step)) == expected
    assert trainer.noted == eager.noted == list(range(8))


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_a_thread_that_ends_in_a_capture() -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    net, x = model(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def work() -> None:
        with contextlib.suppress(SystemExit, CaptureError):
            graphopt.compile(leave)(net, optimizer, x)

    _in_a_thread(work)
    assert _same(trained(1, captured=True), trained(1, captured=False))


def test_a_capture_in_a_backward_in_another_thread() -> None:
    found: list[list[torch.Tensor]] = []

    def hook(_: torch.Tensor) -> None:
        with torch.enable_grad():
            found.append(trained(3, captured=True))

    def work() -> None:
        doubled = torch.ones(2, requires_grad=True) * 2
        doubled.register_hook(hook)
        doubled.sum().backward()

    _in_a_thread(work)
    assert _same(found[0], trained(3, captured=False))


def scored(number: int, captured: bool) -> torch.Tensor:
    """Without a backward, which torch's builds for CUDA refuse in a forked process."""
    net, x = model(100 + number)

    def step(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return net(x).square()  # type: ignore[no-any-return]

    return (graphopt.compile(step) if captured else step)(net, x)  # type: ignore[no-any-return]


class OfScores(Dataset[torch.Tensor]):
    """A data set whose items are made by a step that is captured."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return scored(index, captured=True)


def test_a_process_that_is_forked_during_a_capture_captures() -> None:
    begun, over = threading.Event(), threading.Event()

    def trace() -> None:
        with taking_turns():
            begun.set()
            over.wait(120)

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        assert begun.wait(60)
        made = list(DataLoader(OfScores(), None, num_workers=1, timeout=100))
    finally:
        over.set()
        thread.join()
    assert _same(made, [scored(number, captured=False) for number in range(2)])


DRAWS = (random.random, numpy.random.rand, lambda: random.gauss(0, 1))


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_is_refused_where_other_threads_run(draw: Callable[[], float]) -> None:
    """Also where a library draws, whose lines are not looked at. Both generators stay as they
    are, which those threads draw from as well, unless the library has a function of theirs itself:
    nothing tells then who has drawn."""
    library: dict[str, Any] = {"draw": draw}
    file = random.__file__.replace("random.py", "drawing.py")
    exec(compile("def scaled(x): return x * draw()", file, "exec"), library)
    net, x = model(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = random.getstate(), numpy.random.get_state()[2]
    with Beside(list), pytest.raises(CaptureError, match="random"):
        graphopt.compile(lambda x: train(net, optimizer, library["scaled"](x)))(x)
    if isinstance(draw, FunctionType):
        assert (random.getstate(), numpy.random.get_state()[2]) == before


def _refusal(step: Callable[[torch.Tensor], object], x: torch.Tensor) -> str | None:
    try:
        step(x)
    except CaptureError as error:
        return str(error)
    return None


GENERATORS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.random.__self__,  # type: ignore[attr-defined]
    "numpy": lambda: numpy.random.rand.__self__,
    "Random": lambda: random.Random(1),
    "RandomState": lambda: numpy.random.RandomState(1),
    "Generator": lambda: numpy.random.default_rng(1),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_the_step_holds_is_left_to_other_threads(kind: str) -> None:
    """What they draw beside a capture does not come again. The capture cannot tell who has drawn:
    it may be refused, for this reason."""
    generator = GENERATORS[kind]()
    alone = copy.deepcopy(generator)
    net, x = model(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held = (generator, generator.random)
    with Beside(lambda: [generator.random()]) as beside:
        refusal = _refusal(graphopt.compile(lambda x: (held, train(net, optimizer, x))[1]), x)
    assert refusal is None or "unless another thread did" in refusal
    assert len(beside.results) > 2 and not beside.errors
    assert [drawn for (drawn,) in beside.results] == [alone.random() for _ in beside.results]
