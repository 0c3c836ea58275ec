"""What functions on the host find outside the step and change there: as in eager code, or an error
wherever they use what the step has set before them, or change what it uses."""

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
STALE: dict[str, Body] = {}
REFUSED: dict[str, Body] = {}


def seen(body: Body) -> Body:
    SEEN[body.__name__] = body
    return body


def stale(body: Body) -> Body:
    STALE[body.__name__] = body
    return body


def refused(body: Body) -> Body:
    REFUSED[body.__name__] = body
    return body


@stale
def a_count(w: World, x: Tensor) -> Any:
    w.count += 1
    w.sees(lambda w: w.count)
    return w.train(x)


@stale
def a_number_of_a_tensor(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.average = 0.9 * w.average + loss.item()
    w.sees(lambda w: f"{w.average:.3f}")
    return loss


@stale
def an_item(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.table["loss"] = loss.item()
    w.sees(lambda w: w.table["loss"] + 1)
    return loss


@stale
def a_tensor(w: World, x: Tensor) -> Any:
    w.last = w.model(x).detach()
    w.sees(lambda w: w.last.sum())
    return w.train(x)


@stale
def a_new_attribute(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.newest = loss
    w.sees(lambda w: bool(w.newest))
    return loss


@stale
def a_setting(w: World, x: Tensor) -> Any:
    w.count += 1
    w.rate = 0.1 / (w.count + 1)
    w.sees(lambda w: w.rate * 2)
    return w.train(x)


@stale
def an_object_as_a_whole(w: World, x: Tensor) -> Any:
    w.space.count += 1
    w.sees(lambda w: copy.deepcopy(w.space))
    return w.train(x)


COUNT = 0


@stale
def a_global_variable(w: World, x: Tensor) -> Any:
    global COUNT
    COUNT += 1
    w.sees(lambda w: COUNT + 1)
    return w.train(x)


@seen
def what_it_is_given(w: World, x: Tensor) -> Any:
    w.count += 1
    call(w.seen.append, w.count)
    loss = w.train(x)
    w.average = 0.9 * w.average + loss.item()
    call(lambda *given: w.seen.append(plain(given)), w.average, loss, w.count)
    return loss


@seen
def constants_and_what_it_leaves_alone(w: World, x: Tensor) -> Any:
    w.count += 1
    w.text = "a"
    w.sees(lambda w: (w.text, w.flag, w.history))
    w.text = "b"
    w.sees(lambda w: w.text)
    return w.train(x)


@seen
def what_the_step_sets_later(w: World, x: Tensor) -> Any:
    w.sees(lambda w: (w.count, w.table["count"], w.rate))
    w.count += 1
    w.table["count"] += 1
    loss = w.train(x)
    w.rate = 0.1 / w.count
    return loss


@seen
def what_a_function_keeps(w: World, x: Tensor) -> Any:
    loss = w.train(x)
    w.count += 1
    call(lambda value: w.history.append(value.item()), loss)
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
def a_count_that_the_step_sets(w: World, x: Tensor) -> Any:
    call(lambda: setattr(w, "count", 0))
    loss = w.train(x)
    w.count += 1
    return loss


@refused
def a_count_that_the_step_has_set(w: World, x: Tensor) -> Any:
    w.count += 1
    call(lambda: setattr(w, "count", 0))
    return w.train(x)


@refused
def a_rate_that_the_step_sets(w: World, x: Tensor) -> Any:
    call(lambda: setattr(w, "rate", 0.25))
    loss = w.train(x)
    w.rate = 0.5
    return loss


@refused
def a_list_of_the_step(w: World, x: Tensor) -> Any:
    rows = [1]
    call(lambda: w.seen.append(rows))
    rows.append(2)
    return w.train(x)


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
    with pytest.raises(GraphOptError, match=r"graphopt\.callback"):
        trained(REFUSED[name], True)


@pytest.mark.parametrize("name", STALE)
def test_what_the_step_has_set_before_is_an_error(name: str) -> None:
    with pytest.raises(GraphOptError, match="which the step has set before"):
        trained(STALE[name], True)


@pytest.mark.parametrize("fails", [0, 2])
def test_after_an_error_everything_is_as_before(fails: int) -> None:
    """What stands before the last update has not happened."""
    world = World()
    number = 0

    def check() -> None:
        if number == fails:
            raise ValueError("stop")

    def step(x: Tensor) -> Tensor:
        world.count += 1
        world.rate = 0.1 / world.count
        call(check)
        call(lambda *given: world.seen.append(given), world.count, world.rate)
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
        call(lambda *given: world.seen.append(given), world.count, world.last, world.space.count)
        return loss

    run = graphopt.compile(step) if compiled else step
    generator = torch.Generator().manual_seed(rank)
    losses = [run(torch.randn(4, 3, generator=generator)).item() for _ in range(CALLS)]
    if isinstance(run, graphopt.TrainStep):
        run.flush()
    return losses, world.seen, [p.tolist() for p in world.model.parameters()], world.rate


def test_on_two_ranks(two_ranks: Pool) -> None:
    assert two_ranks.run(seen_by_ranks) == [True, True]
