"""What a step computes of lists and queues that it appends to, and that the program keeps."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import CaptureError, GraphOptError

COMPENSATES = sys.version_info >= (3, 12)
"""Whether `sum` makes up for rounding errors, and is refused."""

Effect = Callable[[Any, Tensor], Any]


def of_all(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    kept.mean = sum(kept.rows) / len(kept.rows)


def of_the_last(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    if len(kept.rows) > 2:
        kept.rows.pop(0)
    kept.mean = sum(kept.rows) / len(kept.rows)


def before_it_adds(kept: Any, loss: Tensor) -> Any:
    mean = sum(kept.rows) / max(len(kept.rows), 1)
    kept.rows += [loss.item(), 1]
    return mean


def always_taking(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    del kept.rows[0]
    kept.mean = sum(kept.rows)


def smallest(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    kept.mean = min(kept.rows)
    return 2.0 if loss.item() > kept.mean else 1.0


def largest_so_far(kept: Any, loss: Tensor) -> Any:
    before = max(kept.rows) if kept.rows else 0.0
    kept.rows.append(loss.item())
    return before


def last(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    if len(kept.rows) > 1:
        kept.mean = kept.rows[-1] - kept.rows[-2]
    return kept.rows[-1]


def last_before_it_adds(kept: Any, loss: Tensor) -> Any:
    better = not kept.rows or loss.item() < kept.rows[-1]
    kept.rows.append(loss.item())
    return float(better)


def of_a_queue(kept: Any, loss: Tensor) -> Any:
    kept.window.append(loss.item())
    kept.mean = max(kept.window) / len(kept.window)
    return kept.window[-1] - min(kept.window)


def mean_of_a_queue(kept: Any, loss: Tensor) -> Any:
    kept.window.append(loss.item())
    kept.mean = sum(kept.window) / len(kept.window)
    return kept.mean


def several_into_a_queue(kept: Any, loss: Tensor) -> Any:
    kept.window.extend([loss.item(), 0.5])
    kept.mean = max(kept.window)
    if len(kept.window) == 3:
        kept.window.popleft()
    return float(len(kept.window))


def taken_from_a_queue(kept: Any, loss: Tensor) -> Any:
    kept.queue.append(loss.item())
    if len(kept.queue) > 3:
        kept.queue.popleft()
    return min(kept.queue)


def mixed_with_integers(kept: Any, loss: Tensor) -> Any:
    kept.rows += [loss.item(), 1]
    return max(kept.rows)


def into_the_last(kept: Any, loss: Tensor) -> Any:
    if kept.rows:
        kept.rows[-1] += loss.item()
    return kept.rows[-1] if kept.rows else None


def differences(kept: Any, loss: Tensor) -> None:
    kept.rows.append(loss.item())
    kept.table["step"] = kept.rows[-1] - kept.rows[-2] if len(kept.rows) > 1 else 0.0


def largest_by_default(kept: Any, loss: Tensor) -> Any:
    best = max(kept.rows, default=0.5)
    kept.rows.append(loss.item())
    return best


def of_the_first(kept: Any, loss: Tensor) -> Any:
    kept.rows.append(loss.item())
    return kept.rows[-1] / kept.rows[0] if kept.rows[0] else None


def begun_in_a_table(kept: Any, loss: Tensor) -> Any:
    kept.sums["loss"] += loss.item()
    kept.sums["count"] += 1
    return kept.sums["loss"] / kept.sums["count"]


def alike(kept: Any, loss: Tensor) -> None:
    of_all(kept, loss)
    kept.rows.reverse()


SPECIAL = [1.0, -0.0, 0.0, float("nan"), 2.0, float("nan"), -1.5, float("inf")]


def run(
    effect: Effect, compiled: bool, between: Effect, values: Sequence[float] = ()
) -> tuple[list[str], int]:
    """What each call leaves, as text: of NaN, signs of zeros and kinds of numbers as well."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    kept = SimpleNamespace(rows=[], mean=0.0, window=deque(maxlen=3), queue=deque(), table={})
    kept.stops, kept.sums = False, defaultdict(float)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, value: Tensor | None) -> Any:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found = effect(kept, loss if value is None else value * 1)
        return loss.detach(), found

    used: Any = graphopt.compile(step) if compiled else step
    found = []
    for index, x in enumerate(torch.randn(8, 5, 4)):
        returned = used(x, torch.tensor(values[index]) if values else None)
        found.append(f"{returned} {kept}")
        between(kept, torch.tensor(index))
    return found, len(used.captures) if compiled else 0


def nothing(kept: Any, index: Tensor) -> None:
    pass


def cleared(kept: Any, index: Tensor) -> None:
    if index.item() == 3:
        kept.rows.clear()


def another_list(kept: Any, index: Tensor) -> None:
    if index.item() == 3:
        kept.rows = [0.5, 2]


def other_values(kept: Any, index: Tensor) -> None:
    kept.rows[:] = [1e16, 1, 2.5, index.item()][: index.item() + 1]


def queue_cleared(kept: Any, index: Tensor) -> None:
    if index.item() == 4:
        kept.window.clear()
    elif index.item() == 6:
        kept.window.appendleft(float("nan"))


SUMS = [
    (of_all, cleared),
    (of_the_last, nothing),
    (of_the_last, other_values),
    (of_the_last, another_list),
    (before_it_adds, nothing),
    (always_taking, other_values),
    (alike, nothing),
    (mean_of_a_queue, queue_cleared),
]
OTHERS = [
    (smallest, cleared),
    (smallest, other_values),
    (largest_so_far, nothing),
    (last, cleared),
    (last_before_it_adds, another_list),
    (of_a_queue, queue_cleared),
    (several_into_a_queue, nothing),
    (taken_from_a_queue, nothing),
    (begun_in_a_table, nothing),
]


@pytest.mark.parametrize(("effect", "between"), [*([] if COMPENSATES else SUMS), *OTHERS])
def test_it_is_that_of_the_call(effect: Effect, between: Effect) -> None:
    expected, _ = run(effect, False, between)
    found, captures = run(effect, True, between)
    assert found == expected
    assert captures <= (4 if between is nothing else 7)


OF_ANY_VALUES = [
    *(smallest, largest_so_far, last, of_a_queue, taken_from_a_queue),
    *(mixed_with_integers, into_the_last, differences),
    *(largest_by_default, of_the_first),
]


@pytest.mark.parametrize("effect", OF_ANY_VALUES)
def test_it_is_that_of_any_values(effect: Effect) -> None:
    expected, _ = run(effect, False, other_values, SPECIAL)
    found, captures = run(effect, True, other_values, SPECIAL)
    assert found == expected
    assert captures <= 7


def test_items_that_have_been_taken_out_are_not_found() -> None:
    def takes(kept: Any, loss: Tensor) -> Any:
        kept.rows.append(loss.item())
        kept.rows.pop(0)
        return kept.rows[-2]

    kept_enough = [[0.5, 1.5, 2.5], [0.5, 1.5], [0.5]]

    def fewer(kept: Any, index: Tensor) -> None:
        kept.rows[:] = kept_enough[min(int(index), 2)]

    def begun(kept: Any, loss: Tensor) -> Any:
        return takes(kept, loss) if kept.rows else 0.0

    for compiled in (False, True):
        with pytest.raises((IndexError, CaptureError), match="out of range"):
            run(begun, compiled, fewer)


@pytest.mark.parametrize("ask", [len, min, max, sum, lambda rows: rows[-1], bool])
def test_a_function_on_the_host_may_not_change_what_is_read_behind_it(
    ask: Callable[[list[float]], Any],
) -> None:
    def checked(kept: Any, loss: Tensor) -> Any:
        kept.rows.append(loss.item())
        graphopt.callback(lambda value: kept.rows.append(-1.0) if kept.stops else None, loss)
        return float(ask(kept.rows))

    def stops(kept: Any, index: Tensor) -> None:
        kept.stops = index.item() > 2

    with pytest.raises(GraphOptError, match="which the step reads behind the call"):
        run(checked, True, stops)


def test_an_item_that_the_step_puts_there_and_changes_is_refused() -> None:
    def begins(kept: Any, loss: Tensor) -> None:
        if not kept.rows:
            kept.rows.append(0.0)
        kept.rows[-1] += loss.item()

    def begun(kept: Any, loss: Tensor) -> None:
        if kept.rows or kept.stops:
            begins(kept, loss)

    def between(kept: Any, index: Tensor) -> None:
        kept.rows[:], kept.stops = [1.0][: int(index < 2)], True

    for effect in (begins, begun):
        with pytest.raises(CaptureError, match="keeps a number"):
            run(effect, True, between)


def test_a_list_that_is_used_otherwise_is_refused() -> None:
    def adds(kept: Any, loss: Tensor) -> None:
        smallest(kept, loss)
        kept.rows.sort()

    with pytest.raises(CaptureError, match="outside"):
        run(adds, True, nothing)
