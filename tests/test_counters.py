"""Python numbers that a step keeps outside its arguments and changes, against eager; also on
several ranks."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import math
import secrets
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool

CALLS = 7


class Network:
    """A layer and its optimizer."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.1)

    def finish(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, x: Tensor, y: Tensor, scale: Any = 1.0) -> Tensor:
        return self.finish(F.cross_entropy(self.layer(x), y) * scale)


class Loop(NamedTuple):
    """A training loop that is not captured yet.

    Attributes:
        step: of a batch.
        left: what the program finds after a call.
        between: done after each call, with its number.
        captures: how many graphs its calls need.
    """

    step: Callable[..., Any]
    left: Callable[[], Any]
    between: Callable[[int], None] = lambda number: None
    captures: int = 1


class Delayed(Network):
    """As TD3 updates its actor."""

    def __init__(self) -> None:
        super().__init__()
        self.total_it, self.policy_freq = 0, 3

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.total_it += 1
        loss = F.cross_entropy(self.layer(x), y)
        if self.total_it % self.policy_freq == 0:
            loss = loss * 2
        return self.finish(loss)


def delayed() -> Loop:
    agent = Delayed()

    def between(number: int) -> None:
        if number == 4:
            agent.total_it = 100

    return Loop(agent.step, lambda: agent.total_it, between, captures=2)


def of_a_module() -> Loop:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.iter, self.tau = nn.Linear(4, 3), 0, 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.iter += 1
            self.tau = max(0.5, self.tau * 0.8)
            return self.inner(x) * min(1, self.iter / 4) / self.tau  # type: ignore[no-any-return]

    net = Network()
    net.layer.forward = (annealed := Annealed()).forward  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(annealed.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(annealed(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    left = lambda: (annealed.iter, annealed.tau, annealed.inner.weight)  # noqa: E731
    return Loop(step, left, captures=2)


def variable_of_a_closure() -> Loop:
    net, steps = Network(), 0

    def step(x: Tensor, y: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return net.train(x, y, 1.0 / steps)

    return Loop(step, lambda: steps)


class Meter:
    """As the examples of ImageNet have it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def meters() -> Loop:
    net, losses, hits = Network(), Meter(), Meter()

    def step(x: Tensor, y: Tensor) -> Tensor:
        output = net.layer(x)
        loss = net.finish(F.cross_entropy(output, y))
        losses.update(loss.item(), x.size(0))
        hits.update((output.argmax(1) == y).sum().item(), x.size(0))
        return loss

    def between(number: int) -> None:
        if number == 3:
            losses.reset()

    return Loop(step, lambda: (vars(losses).copy(), vars(hits).copy()), between, captures=2)


def containers() -> Loop:
    net = Network()
    table, row = {"n": 0, "mean": 0.5}, [0, 1.0, None]
    sums: dict[str, float] = collections.defaultdict(float)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.train(x, y)
        table["n"] += 1
        table["mean"] = 0.9 * table["mean"] + 0.1 * loss.item()
        row[0] += len(x)  # type: ignore[operator]
        row[-2] *= 0.5  # type: ignore[operator]
        sums["loss"] += loss.item()
        table.update(last=loss.item())
        return loss / table["n"]

    return Loop(step, lambda: (dict(table), list(row), dict(sums)), captures=2)


@dataclasses.dataclass
class State:
    step: int = 0
    best: float = math.inf
    best_step: int = 0


@dataclasses.dataclass(slots=True)
class SlotState:
    step: int = 0


def data_classes() -> Loop:
    net, state, slots = Network(), State(), SlotState()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.train(x, y, 1 + slots.step)
        state.step += 1
        slots.step += 1
        if loss.item() < state.best:
            state.best, state.best_step = loss.item(), state.step
        return loss

    return Loop(step, lambda: (dataclasses.astuple(state), slots.step), captures=2)


class Stopping:
    """Stops when nothing is gained any more."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.counter, self.stop = 0, False

    def __call__(self, loss: float) -> None:
        if self.best is None:
            self.best = loss
        elif loss > self.best:
            self.counter += 1
            if self.counter >= 2:
                self.stop = True
        else:
            self.best, self.counter = loss, 0


def early_stopping() -> Loop:
    net, stopping = Network(), Stopping()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net.train(x, y, 1.0)
        stopping(loss.item())
        return loss

    return Loop(step, lambda: (stopping.best, stopping.counter, stopping.stop), captures=-1)


class Warmed:
    """A wrapper that counts, and sets the rate of another optimizer."""

    count = 0

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rate = optimizer, 0.0

    def step(self) -> None:
        Warmed.count += 1
        self.rate = 0.5 * min(Warmed.count**-0.5, Warmed.count * 3**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.step()


def attribute_of_a_class() -> Loop:
    Warmed.count = 0
    net = Network()
    warmed = Warmed(net.optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net.layer(x), y)
        net.optimizer.zero_grad()
        loss.backward()
        warmed.step()
        return loss

    rates = lambda: (Warmed.count, warmed.rate, net.optimizer.param_groups[0]["lr"])  # noqa: E731
    return Loop(step, rates)


def of_an_optimizer() -> Loop:
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            super().step()
            if self.calls % 2 == 0:
                with torch.no_grad():
                    for parameter in self.param_groups[0]["params"]:
                        parameter.mul_(0.9)

    net = Network()
    net.optimizer = optimizer = Counting(net.layer.parameters(), lr=0.1)  # type: ignore[assignment]
    optimizer.calls = 0
    return Loop(net.train, lambda: optimizer.calls, captures=2)


def indexes() -> Loop:
    """Counts choose from a list, a dictionary and a range: a graph for each value."""
    net, state = Network(), State()
    scales, names = [1.0, 0.5, 0.25], {0: 1.0, 1: 2.0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        scale = scales[state.step % 3] * names[state.step % 2]
        state.step += 1
        for _ in range(state.step % 2):
            scale = scale + 1
        return net.train(x, y, scale)

    return Loop(step, lambda: state.step, captures=6)


def flags() -> Loop:
    """A bool and a text that go to and fro have a graph for each value."""
    net, flips = Network(), {"on": False, "phase": "a"}

    def step(x: Tensor, y: Tensor) -> Tensor:
        flips["on"] = not flips["on"]
        flips["phase"] = "b" if flips["phase"] == "a" else "a"
        return net.train(x, y, 2.0 if flips["on"] else 1.0)

    return Loop(step, lambda: dict(flips), captures=2)


def told_without_being_read() -> Loop:
    net, table = Network(), {"rows": 0, "phase": "none", "seen": None}

    def step(x: Tensor, y: Tensor) -> Tensor:
        table["rows"], table["phase"], table["seen"] = len(x), "train", True
        return net.train(x, y)

    def between(number: int) -> None:
        table["phase"], table["seen"] = "eval", False

    return Loop(step, lambda: dict(table), between, captures=2)


def in_two_places() -> Loop:
    """The same object on two paths, and equal numbers in two places."""
    net, one = Network(), State()
    two, other = one, State()

    def step(x: Tensor, y: Tensor) -> Tensor:
        one.step += 1
        two.step += 1
        other.step = one.step
        two.best_step = other.step + two.step
        return net.train(x, y, 1.0 / (one.step + other.best_step + 1))

    def between(number: int) -> None:
        other.best_step = one.step

    left = lambda: (dataclasses.astuple(one), dataclasses.astuple(other))  # noqa: E731
    return Loop(step, left, between, captures=3)


LOOPS = {
    loop.__name__: loop
    for loop in (
        *(delayed, of_a_module, variable_of_a_closure, meters, containers, data_classes),
        *(early_stopping, attribute_of_a_class, of_an_optimizer),
        *(told_without_being_read, in_two_places, indexes, flags),
    )
}


def frozen(value: Any) -> Any:
    """Numbers with their classes, tensors as bytes."""
    if isinstance(value, Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    return type(value), repr(value)


def run(
    make: Callable[[], Loop], compiled: bool, calls: int = CALLS, **options: Any
) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    loop = make()
    step = graphopt.compile(loop.step, **options) if compiled else loop.step
    found = []
    for number in range(calls):
        rows = 4 if number == 2 and make is told_without_being_read else 5
        loss = step(torch.randn(rows, 4), torch.randint(0, 3, (rows,)))
        found.append(frozen((loss, loop.left())))
        loop.between(number)
    captures = len(step.captures) if isinstance(step, graphopt.TrainStep) else 0
    assert not compiled or loop.captures in (-1, captures)
    return found, captures


@pytest.mark.parametrize("name", LOOPS)
def test_numbers_are_those_of_eager(name: str) -> None:
    expected, _ = run(LOOPS[name], compiled=False)
    assert len({str(each) for each in expected}) == CALLS  # each call leaves something else
    found, _ = run(LOOPS[name], compiled=True)
    assert found == expected


def test_counts_need_no_graph_for_each_value() -> None:
    """More calls than graphs are kept."""
    expected, _ = run(delayed, compiled=False, calls=40)
    found, captures = run(delayed, compiled=True, calls=40)
    assert found == expected and captures == 2


def test_compiled_code_takes_counts() -> None:
    """A count goes into code that Inductor makes, whose last bits are its own."""
    expected, _ = run(containers, compiled=False)
    found, _ = run(containers, compiled=True, lower="inductor")
    for ours, theirs in zip(found, expected, strict=True):
        (table, row, _), (wanted, wanted_row, _) = ours[1], theirs[1]
        assert (table[0], row) == (wanted[0], wanted_row)
        values = [float(each[1][1]) for each in (table[1], wanted[1], table[2], wanted[2])]
        assert math.isclose(values[0], values[1], rel_tol=1e-5)
        assert math.isclose(values[2], values[3], rel_tol=1e-5)


def test_a_refused_capture_and_an_error_leave_the_numbers() -> None:
    net, state, seen = Network(), State(), [1]

    def step(x: Tensor, y: Tensor, fails: bool) -> Tensor:
        state.step += 1
        loss = net.train(x, y, state.step)
        if fails:
            seen.append({str(loss.item()): 1})
        return loss

    compiled = graphopt.compile(step)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    with pytest.raises(graphopt.CaptureError):
        compiled(x, y, True)
    assert (state.step, seen) == (0, [1])
    compiled(x, y, False)
    with pytest.raises(graphopt.CaptureError):
        compiled(x, y, True)
    assert (state.step, seen) == (1, [1])

    def raises(loss: Tensor) -> None:
        raise LookupError("no such row")

    def called(x: Tensor, y: Tensor) -> None:
        state.step += 1
        graphopt.callback(raises, net.layer(x).sum())
        net.train(x, y, state.step)

    with pytest.raises(LookupError):
        graphopt.compile(called)(x, y)


def test_a_failed_assumption_leaves_the_numbers() -> None:
    """The branch that a call does not take has counted nothing."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net, state = Network(), State()

        def step(x: Tensor, y: Tensor, net: Network = net, state: State = state) -> Tensor:
            state.step += 1
            loss = F.cross_entropy(net.layer(x), y)
            if not torch.isfinite(loss):
                state.best_step += 1
                return loss
            state.best = loss.item()
            return net.finish(loss)

        wrapped = graphopt.compile(step) if compiled else step
        for number in range(8):
            x = torch.randn(5, 4)
            x[0] = math.nan if number in (3, 5, 6) else 0.0
            loss = wrapped(x, torch.randint(0, 3, (5,)))
            found.append(frozen((loss, dataclasses.astuple(state))))
    assert found[:8] == found[8:]


@pytest.mark.parametrize("start", [2**53 - 2, 2**70])
def test_integers_beyond_float64(start: int) -> None:
    net, state = Network(), State(step=start)

    def step(x: Tensor, y: Tensor) -> Tensor:
        state.step += 1
        return net.train(x, y, 1.0 if state.step % 2 else 0.5)

    compiled, x, y = graphopt.compile(step), torch.randn(5, 4), torch.randint(0, 3, (5,))
    count = max(start, min(start + 2, 2**53))
    for _ in range(count - start if count <= 2**53 else 0):
        compiled(x, y)
    with pytest.raises(graphopt.CaptureError, match=r"state\.step"):
        compiled(x, y)
    assert state.step == count


@pytest.mark.parametrize(
    ("start", "more"),
    [
        *[(2**53 - 2, 1), (2**70, 1), ("", "x"), ((), (1,)), (1j, 1), (True, True)],
        *[(Fraction(1, 3), 1), (numpy.float64(0.5), 1), (numpy.int64(5), 1)],
    ],
    ids=str,
)
def test_what_nobody_reads_and_no_input_can_be(start: Any, more: Any) -> None:
    """It changes in every call, or is refused and left alone: it changed at capture only."""
    net, kept = Network(), {"": start}

    def step(x: Tensor, y: Tensor) -> Tensor:
        if start is True:
            kept[""] ^= more
        else:
            kept[""] += more
        return net.train(x, y)

    compiled, x, y = graphopt.compile(step), torch.randn(5, 4), torch.randint(0, 3, (5,))
    expected = start
    for _ in range(5):
        try:
            compiled(x, y)
        except graphopt.CaptureError:
            break
        expected = expected ^ more if start is True else expected + more
        assert (type(kept[""]), kept[""]) == (type(expected), expected)
    assert kept[""] == expected


def test_another_object_in_the_place_is_counted_in() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Network()
        held = [Meter()]

        def step(x: Tensor, y: Tensor, net: Network = net, held: list[Meter] = held) -> Tensor:
            loss = net.train(x, y)
            held[0].update(loss.item(), len(x))
            return loss

        wrapped = graphopt.compile(step) if compiled else step
        meters = []
        for number in range(9):
            if number % 3 == 0:
                held[0] = Meter()
                meters.append(held[0])
            wrapped(torch.randn(5, 4), torch.randint(0, 3, (5,)))
            found.append(frozen([vars(meter) for meter in meters]))
    assert found[:9] == found[9:]


def test_graphs_that_count_are_captured_once_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphopt"):
        run(delayed, compiled=True)
    assert sum("capturing" in record.message for record in caplog.records) == 2


def test_a_loop_in_which_the_time_is_kept_is_refused() -> None:
    net, state = Network(), State()

    def step(x: Tensor, y: Tensor) -> Tensor:
        state.step = clock()
        return net.train(x, y)

    with pytest.raises(graphopt.CaptureError):
        graphopt.compile(step)(torch.randn(5, 4), torch.randint(0, 3, (5,)))
    assert state.step == 0


def clock() -> int:
    """What no other call gives, as a time that nobody follows."""
    return secrets.randbelow(1 << 40)


class Agent:
    """In every second call the loss has another term, and a second optimizer steps."""

    def __init__(self, wrapped: bool) -> None:
        torch.manual_seed(0)
        self.nets: Any = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        if wrapped:
            self.nets = [DistributedDataParallel(net) for net in self.nets]
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizers = [torch.optim.Adam(parameters), torch.optim.SGD(parameters, lr=0.1)]
        self.calls, self.sum = 0, 0.0

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        loss = sum(F.cross_entropy(net(x), y) for net in self.nets) / self.calls
        if self.calls % 2 == 0:
            loss = loss + self.nets[0](x).square().mean()
        optimizer = self.optimizers[self.calls % 2]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.sum += loss.item()
        return loss

    def left(self) -> Any:
        state = [list(net.parameters()) for net in self.nets]
        return copy.deepcopy((state, self.calls, self.sum))


def trained(rank: int, start: int, compiled: bool) -> tuple[list[Any], int]:
    agent = Agent(wrapped=not compiled)
    agent.calls = start
    step = graphopt.compile(agent.step) if compiled else agent.step
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(6):
        x = torch.randn(5, 4, generator=generator)
        step(x, torch.randint(0, 3, (5,), generator=generator))
        found.append(agent.left())
    return found, len(step.captures) if isinstance(step, graphopt.TrainStep) else 0


def compared(rank: int, apart: bool) -> tuple[bool, int, Any]:
    start = rank if apart else 0
    (expected, _), (found, captures) = trained(rank, start, False), trained(rank, start, True)
    parameters = [[p for net in each[0] for p in net] for each in expected]
    ours = [[p for net in each[0] for p in net] for each in found]
    equal = all(
        torch.equal(a, b)
        for x, y in zip(parameters, ours, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    return equal and [e[1:] for e in expected] == [f[1:] for f in found], captures, found[-1][1:]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_count_for_themselves(two_ranks: Pool, apart: bool) -> None:
    """Also where one has counted further, and takes the other branch."""
    results = two_ranks.run(compared, apart)
    assert [equal for equal, *_ in results] == [True, True]
    assert [captures for _, captures, _ in results] == [2, 2]
    (calls, total), (others, other_total) = (left for *_, left in results)
    assert (calls, others) == (6, 6 + apart) and total != other_total
