"""What a step does to lists, queues, sets and counters outside it, each call does."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Row(NamedTuple):
    loss: Any
    epoch: int


@dataclass
class Entry:
    loss: Any
    tags: list[Any] = field(default_factory=list)


@dataclass
class Log:
    rows: list[Any] = field(default_factory=lambda: [3, 1, 2])
    last: deque[Any] = field(default_factory=lambda: deque([0, 1], maxlen=4))
    seen: set[Any] = field(default_factory=lambda: {"first"})
    counts: Counter[str] = field(default_factory=lambda: Counter(a=1, b=2))
    by_name: dict[str, Any] = field(default_factory=lambda: {"rows": [0]})


Change = Callable[[Log, Tensor], None]
CHANGES: dict[str, Change] = {}
NAMES = ["u", "v"]


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def called(name: str, function: Callable[[Log, Tensor], object]) -> None:
    def use(log: Log, loss: Tensor) -> None:
        function(log, loss)

    CHANGES[name] = use


called("insert", lambda log, loss: log.rows.insert(0, 5))
called("insert of a number read", lambda log, loss: log.rows.insert(1, loss.item()))
called("insert of a tensor", lambda log, loss: log.rows.insert(-1, loss.detach()))
called("appendleft", lambda log, loss: log.last.appendleft(loss.item()))
called("extendleft", lambda log, loss: log.last.extendleft([1, loss.item()]))
called("extend", lambda log, loss: log.last.extend((1, loss.item())))
called("add", lambda log, loss: log.seen.add("new"))
called("update of a set", lambda log, loss: log.seen.update(["one", "two"]))
called("named tuple", lambda log, loss: log.rows.append(Row(loss.item(), 1)))
called("data class", lambda log, loss: log.rows.append(Entry(1, ["x"])))
called("data class of tensors", lambda log, loss: log.rows.append(Entry(loss.detach(), [{}])))
called("ordered dictionary", lambda log, loss: log.rows.append(OrderedDict(a=1)))
called("default dictionary", lambda log, loss: log.rows.append(defaultdict(list, a=[1])))
called("queue", lambda log, loss: log.rows.append(deque([1, loss.item()], maxlen=3)))
called("object from outside in a list", lambda log, loss: log.rows.append([NAMES, 1]))
called("counter of a list", lambda log, loss: log.counts.update(["a", "b", "a"]))
called("counter of keywords", lambda log, loss: log.counts.update(a=2))
called("counter of a dictionary", lambda log, loss: log.counts.update({"b": 3}))
called("counter of a text", lambda log, loss: log.counts.subtract("ab"))
called("counter that begins", lambda log, loss: log.counts.update(["new", "a"]))


@change
def adds_a_list_in_place(log: Log, loss: Tensor) -> None:
    log.rows += [loss.item(), 2]


@change
def adds_to_a_list_of_a_variable(log: Log, loss: Tensor) -> None:
    rows = log.rows
    rows += (loss.detach(),)


@change
def adds_to_an_item(log: Log, loss: Tensor) -> None:
    log.by_name["rows"] += [loss.item()]


@change
def adds_to_a_queue(log: Log, loss: Tensor) -> None:
    log.last += [1]


@change
def joins_a_set(log: Log, loss: Tensor) -> None:
    log.seen |= {"s"}


@change
def takes_from_a_set(log: Log, loss: Tensor) -> None:
    log.seen -= {"first", "second"}


@change
def discards(log: Log, loss: Tensor) -> None:
    log.seen.discard("second")


@change
def clears(log: Log, loss: Tensor) -> None:
    log.rows.clear()
    log.seen.clear()


@change
def clears_and_fills(log: Log, loss: Tensor) -> None:
    log.rows.clear()
    log.rows.append(loss.item())


@change
def appends_and_pops(log: Log, loss: Tensor) -> None:
    log.rows.append(loss.item())
    log.rows.pop(0)


@change
def puts_in_a_queue_and_takes_out(log: Log, loss: Tensor) -> None:
    log.last.append(loss.item())
    log.last.popleft()


@change
def turns(log: Log, loss: Tensor) -> None:
    log.last.rotate(1)
    log.rows.reverse()


@change
def deletes_an_item(log: Log, loss: Tensor) -> None:
    log.rows.append(loss.item())
    del log.rows[0]


@change
def deletes_a_slice(log: Log, loss: Tensor) -> None:
    log.rows.append(loss.item())
    del log.rows[:-3]


@change
def counts_what_is_new(log: Log, loss: Tensor) -> None:
    log.counts["new"] += 1


def between(log: Log, call: int) -> None:
    """What the program does between two calls."""
    log.rows.append(call)
    log.seen.add("second" if call % 2 else "third")
    if call == 3:
        log.rows, log.by_name["rows"], log.last = [7, 8, 9], [], deque([1], maxlen=3)


def run(
    function: Change, compiled: bool, then: Callable[[Log, int], None] = between
) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    model, log = nn.Linear(4, 1), Log()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(6, 5, 4)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        function(log, loss)
        optimizer.step()
        return loss.detach()

    used = graphopt.compile(step) if compiled else step
    found = []
    for call, batch in enumerate(batches):
        loss = used(batch).item()
        found.append([loss, *(plain(value) for value in vars(log).values())])
        then(log, call)
    return found, used


def plain(value: Any) -> Any:
    """A value with numbers in place of tensors, and the names of all types."""
    if isinstance(value, Tensor):
        return "tensor", value.item(), value.requires_grad
    if value is NAMES:
        return "NAMES"
    if isinstance(value, dict):
        return type(value).__name__, [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, set):
        return "set", sorted(value)
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [plain(item) for item in value]
    return plain(vars(value)) if isinstance(value, Entry) else (type(value).__name__, value)


@pytest.mark.parametrize("name", CHANGES)
def test_each_call_changes_a_container_as_eager_code_does(name: str) -> None:
    expected, _ = run(CHANGES[name], compiled=False)
    found, step = run(CHANGES[name], compiled=True)
    assert found == expected
    assert len(step.captures) <= 3


def test_no_graph_is_captured_for_what_the_program_does_between_calls() -> None:
    for name in ("insert", "add", "clears_and_fills", "appends_and_pops", "counter of a list"):
        _, step = run(CHANGES[name], compiled=True, then=lambda log, call: log.rows.append(call))
        assert len(step.captures) == 1, name


def assert_found_alike(changing: Callable[[Log, Tensor, list[Any]], None]) -> None:
    """Both leave the same, and put into a list what callbacks find."""
    ours: list[Any] = []
    theirs: list[Any] = []
    expected, _ = run(lambda log, loss: changing(log, loss, theirs), compiled=False)
    found, _ = run(lambda log, loss: changing(log, loss, ours), compiled=True)
    assert found == expected
    assert ours == theirs


def test_a_callback_finds_what_the_step_has_changed_before_it() -> None:
    def changing(log: Log, loss: Tensor, found: list[Any]) -> None:
        log.rows.insert(0, loss.item())
        log.seen |= {"s"}
        graphopt.callback(lambda: found.append([plain(log.rows), plain(log.seen)]))
        log.rows.pop()
        log.last.appendleft(loss.item())
        graphopt.callback(lambda: found.append([plain(log.rows), plain(log.last)]))

    assert_found_alike(changing)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss: Entry(loss.item(), [loss.detach()]),
        lambda loss: [Entry(1), Row(loss.detach(), 2)],
        lambda loss: {"names": NAMES, "rows": [NAMES, loss.item()]},
    ],
)
def test_a_callback_finds_what_the_step_has_put_there(make: Callable[[Tensor], Any]) -> None:
    """Data classes too, and objects from outside themselves."""

    def putting(log: Log, loss: Tensor, found: list[Any]) -> None:
        log.rows.append(make(loss))
        log.by_name["rows"] = make(loss)
        graphopt.callback(lambda: found.append([plain(log.rows), plain(log.by_name)]))

    assert_found_alike(putting)


def test_what_a_failing_callback_has_found_is_taken_back() -> None:
    """Where an update follows it, as after any other error."""
    failing = [False]
    before: list[Any] = []

    def fail(log: Log) -> None:
        if failing:
            before.append(plain(log.rows))
            raise ValueError("no disk")

    def changing(log: Log, loss: Tensor) -> None:
        log.rows.insert(0, loss.item())
        log.last.appendleft(1)
        graphopt.callback(lambda: fail(log))

    log, model = Log(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @graphopt.compile
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        changing(log, loss)
        optimizer.step()
        return loss.detach()

    failing.clear()
    step(torch.ones(2, 4))
    kept = plain(log.rows), plain(log.last)
    failing.append(True)
    with pytest.raises(ValueError, match="no disk"):
        step(torch.ones(2, 4))
    assert before[0] != kept[0]
    assert (plain(log.rows), plain(log.last)) == kept


REFUSED: dict[str, tuple[Change, str]] = {
    "generator": (lambda log, loss: log.rows.append(iter([1])), "a list_iterator that it makes"),
    "of numbers read": (lambda log, loss: log.seen.add(loss.item()), "value of a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_call_could_repeat_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(graphopt.CaptureError, match=message) as caught:
        run(function, compiled=True)
    assert "test_changed_containers.py" in str(caught.value)


def test_a_list_that_is_multiplied_is_refused() -> None:
    def doubles(log: Log, loss: Tensor) -> None:
        log.rows *= 2

    with pytest.raises(graphopt.CaptureError, match=r"changes log\.rows in a way"):
        run(doubles, compiled=True)


class Held:
    """An object of the program, of which it has more than data."""

    def __init__(self, value: Any) -> None:
        self.value = value


LEFT: dict[str, Callable[[Log, Tensor], Any]] = {
    "nest": lambda log, loss: [1, [2, {"a": (3, [4])}]],
    "queue": lambda log, loss: deque([1], maxlen=3),
    "empty queue": lambda log, loss: deque(maxlen=3),
    "ordered dictionary": lambda log, loss: OrderedDict(a=1),
    "default dictionary": lambda log, loss: defaultdict(list, a=[loss.item()]),
    "data class": lambda log, loss: Entry(1, ["x"]),
    "data class of numbers read": lambda log, loss: Entry(loss.item(), [loss.item()]),
    "data class of tensors": lambda log, loss: {"a": Entry(loss.detach(), [1])},
    "named tuple": lambda log, loss: Row([1], 2),
    "named tuple of tensors": lambda log, loss: Row(loss.detach(), 2),
    "class": lambda log, loss: Held,
    "object from outside": lambda log, loss: NAMES,
    "object from outside in a nest": lambda log, loss: {"a": [log.seen, 1]},
}


def replaced(log: Log, call: int) -> None:
    """Another value where the step leaves one, and another object for one that it reads."""
    log.by_name["rows"], log.rows, log.seen = call, [call], {call}


@pytest.mark.parametrize("name", LEFT)
def test_each_call_leaves_what_the_step_puts_somewhere(name: str) -> None:
    def leaves(log: Log, loss: Tensor) -> None:
        log.by_name["rows"] = LEFT[name](log, loss)
        log.rows = LEFT[name](log, loss)

    expected, _ = run(leaves, compiled=False, then=replaced)
    found, _ = run(leaves, compiled=True, then=replaced)
    assert found == expected


def test_what_a_step_takes_away_is_taken_away_in_each_call() -> None:
    def deletes(log: Log, loss: Tensor) -> None:
        log.best = loss  # type: ignore[attr-defined]
        del log.best  # type: ignore[attr-defined]

    def then(log: Log, call: int) -> None:
        log.best = call  # type: ignore[attr-defined]

    expected, _ = run(deletes, compiled=False, then=then)
    found, _ = run(deletes, compiled=True, then=then)
    assert found == expected


def test_an_iterator_that_holds_an_argument_is_refused() -> None:
    model, kept = nn.Linear(4, 1), Log()

    def step(x: Tensor) -> Tensor:
        kept.rows = iter([x])  # type: ignore[assignment]
        loss: Tensor = model(x).sum()
        return loss.detach()

    with pytest.raises(graphopt.CaptureError, match="no call can make anew"):
        graphopt.compile(step)(torch.ones(2, 4))


def test_an_object_that_is_replaced_is_not_appended_anew() -> None:
    def appends(log: Log, loss: Tensor) -> None:
        log.last.append([log.by_name, 1])

    def then(log: Log, call: int) -> None:
        log.by_name = {"call": call}

    expected, _ = run(appends, compiled=False, then=then)
    found, _ = run(appends, compiled=True, then=then)
    assert found == expected
