"""What functions on the host find outside the step, against eager: what the program has left there
before it calls them, whatever it leaves and wherever they look."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool
from graphopt.errors import GraphOptError

CALLS = 4
call = graphopt.callback


class World:
    """A trainer with all that a step may keep."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.count, self.flag, self.text, self.average = 0, False, "", 0.0
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"count": 0}
        self.pair: list[Any] = [0, 0]
        self.recent: deque[Any] = deque(maxlen=2)
        self.last: Any = None
        self.space = SimpleNamespace(count=0)
        self.seen: list[Any] = []

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def rate(self) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    @rate.setter
    def rate(self, value: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def sees(self, look: Callable[[World], Any], **options: Any) -> None:
        """In each call, `look` is kept."""
        call(lambda: self.seen.append(plain(look(self))), **options)

    def left(self) -> Any:
        kept = {k: plain(v) for k, v in vars(self).items() if k not in ("model",)}
        kept["optimizer"] = plain(self.rate)
        kept["space"] = plain(vars(self.space))
        others = {k: v for k, v in vars(self.model).items() if not k.startswith("_")}
        return copy.deepcopy((kept, plain(self.model.state_dict()), others))


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().tolist()
    if isinstance(value, (list, tuple, deque)):
        return [plain(each) for each in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


Body = Callable[[World, Tensor], Any]
SEEN: dict[str, Body] = {}
REFUSED: dict[str, Body] = {}


def seen(body: Body) -> Body:
    SEEN[body.__name__] = body
    return body


def refused(body: Body) -> Body:
    REFUSED[body.__name__] = body
    return body


@seen
def a_count(w: World, x: Tensor) -> Any:
    w.count += 1
    w.sees(lambda w: w.count)
    loss = w.train(x)
    w.count += 1
    w.sees(lambda w: w.count)
    return loss


@seen
def what_is_taken_back(w: World, x: Tensor) -> Any:
    w.flag, w.text, before = True, "a", w.count
    w.count = before + 5
    w.sees(lambda w: (w.flag, w.text, w.count))
    w.flag, w.text, w.count = False, "b", before
    w.sees(lambda w: (w.flag, w.text, w.count))
    return w.train(x)


@seen
def a_number_of_a_tensor(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.average = 0.9 * w.average + loss.item()
    w.sees(lambda w: w.average)
    return loss


@seen
def items(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.table["count"] += 1
    w.table["loss"] = loss.item()
    w.table.update(a=1, b=float(loss))
    w.pair[0] += 1
    w.pair[1] = float(loss)
    w.sees(lambda w: (dict(w.table), list(w.pair)))
    return loss


@seen
def tensors(w: World, x: Tensor) -> Any:
    hidden = w.model(x).detach()
    w.last = hidden
    w.sees(lambda w: w.last)
    hidden.add_(1)
    w.sees(lambda w: w.last)
    loss = w.train(x)
    w.last = [loss, x]
    w.sees(lambda w: w.last)
    return loss


@seen
def attributes_that_are_new(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.newest = loss
    w.temporary = 1
    w.model.calls = getattr(w.model, "calls", 0) + 1
    w.space.count += 2
    w.sees(lambda w: (w.newest, hasattr(w, "temporary"), w.model.calls, w.space.count))
    del w.temporary
    w.sees(lambda w: hasattr(w, "temporary"))
    return loss


@seen
def settings(w: World, x: Tensor) -> Any:
    w.count += 1
    w.rate = 0.1 / (w.count + 1)
    w.sees(lambda w: w.rate)
    loss = w.train(x)
    w.rate = 0.5
    w.sees(lambda w: w.rate)
    return loss


@seen
def modes(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.model.eval()
    w.sees(lambda w: w.model.training)
    w.model.train()
    w.sees(lambda w: w.model.training)
    return loss


@seen
def now_and_then(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.count += 1
    w.sees(lambda w: w.count, every=2)
    w.count += 1
    return loss


@seen
def what_a_function_changes_stays(w: World, x: Tensor) -> Any:
    w.count += 1
    loss = w.train(x)

    def restart() -> None:
        w.history.append(w.count)
        w.seen.append((w.count, list(w.history)))
        if w.count == 2:
            w.count = 0
            w.history.clear()
            w.rate = w.rate * 0.5

    call(restart)
    return loss


@seen
def variables_of_the_step(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    for i in range(3):
        call(lambda: w.seen.append(i))  # noqa: B023
    table = {"a": 1}
    call(lambda given: w.seen.append(dict(given)), table)
    table["a"] = 2
    call(lambda given: w.seen.append(dict(given)), table)
    return loss


@refused
def a_number_read_behind(w: World, x: Tensor) -> Any:
    call(lambda: setattr(w, "count", w.count + 1))
    return w.train(x * (1 + w.count))  # HERE


@refused
def a_flag_read_behind(w: World, x: Tensor) -> Any:
    call(lambda: setattr(w, "flag", not w.flag))
    if w.flag:  # HERE
        x = x * 2
    return w.train(x)


@refused
def a_rate_read_behind(w: World, x: Tensor) -> Any:
    call(lambda: setattr(w, "rate", w.rate * 0.5))
    return w.train(x)


@refused
def a_variable_changed(w: World, x: Tensor) -> Any:
    factor = 1

    def change() -> None:
        nonlocal factor
        factor += 1

    call(change)
    return w.train(x) * factor


@refused
def a_list_of_the_step_changed(w: World, x: Tensor) -> Any:
    factors = [0]
    call(lambda: factors.append(1))
    return w.train(x) * len(factors)


@refused
def a_dictionary_with_a_tensor_changed(w: World, x: Tensor) -> Any:
    given = {"loss": w.train(x)}
    call(lambda each: each.update(more=1), given)
    return len(given)


COUNTED = 0


def _counts() -> None:
    global COUNTED
    COUNTED += 1


@refused
def reads_a_global_variable_behind(world: World, x: Tensor) -> Any:
    graphopt.callback(_counts)
    return world.model(x).sum() + COUNTED


def trained(body: Body, compiled: bool) -> list[Any]:
    world = World()

    def step(x: Tensor) -> Any:
        return body(world, x)

    run = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(CALLS):
        result = run(torch.randn(4, 3, generator=generator))
        found.append((plain(result), world.left()))
    return found


@pytest.mark.parametrize("name", SEEN)
def test_functions_find_what_the_program_has_left(name: str) -> None:
    assert trained(SEEN[name], True) == trained(SEEN[name], False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_step_would_not_see_is_an_error(name: str) -> None:
    with pytest.raises(GraphOptError, match="on the host"):
        trained(REFUSED[name], True)


@pytest.mark.parametrize("fails", [0, 2])
def test_after_an_error_everything_is_as_before(fails: int) -> None:
    """What stands before the last update has not happened; what the step has left for the function
    is taken back."""
    world = World()
    number = 0

    def check() -> None:
        if number == fails:
            raise ValueError("stop")

    def step(x: Tensor) -> Tensor:
        world.count += 1
        world.rate = 0.1 / world.count
        call(check)
        call(lambda: world.seen.append((world.count, world.rate)))
        return world.train(x)

    run = graphopt.compile(step)
    for number in range(4):
        before = world.left()
        if number != fails:
            run(torch.ones(4, 3))
            assert world.seen[-1] == (world.count, world.rate)
            continue
        with pytest.raises(ValueError, match="stop"):
            run(torch.ones(4, 3))
        assert world.left() == before


def test_containers_among_the_arguments_are_those_of_the_call() -> None:
    def step(model: nn.Module, x: Tensor, rows: list[Any]) -> Tensor:
        loss = model(x).sum()
        call(rows.append, 5)
        call(lambda value: rows.append(value.item()), loss)
        return loss

    model = nn.Linear(3, 2)
    run = graphopt.compile(step)
    for _ in range(3):
        ours: list[Any] = []
        theirs: list[Any] = []
        run(model, torch.ones(4, 3), ours)
        theirs += [5, model(torch.ones(4, 3)).sum().item()]
        assert ours == theirs


def seen_by_ranks(rank: int) -> bool:
    """Each rank counts from a number of its own."""
    return counted_on(rank, compiled=True) == counted_on(rank, compiled=False)


def counted_on(rank: int, compiled: bool) -> tuple[Any, ...]:
    world = World()
    world.count = 10 * rank
    if not compiled:
        world.model = nn.parallel.DistributedDataParallel(world.model)

    def step(x: Tensor) -> Tensor:
        loss = world.train(x)
        world.count += 1
        world.space.count += 1
        world.last = loss.item()
        world.sees(lambda w: (w.count, w.last, w.space.count, w.rate))
        return loss

    run = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    losses = [run(torch.randn(4, 3, generator=generator)).item() for _ in range(CALLS)]
    if isinstance(run, graphopt.TrainStep):
        run.flush()
    return losses, world.seen, [p.tolist() for p in world.model.parameters()], world.rate


def test_on_two_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(seen_by_ranks) == [True, True]
