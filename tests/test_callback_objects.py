"""Objects that functions on the host hold, and that a program makes anew: each call finds the one
that is there, whatever way the function has got to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt import callback


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: Tensor, n: int = 1) -> None:
        self.sum, self.count = self.sum + float(value) * n, self.count + n


class Twice(Meter):
    def update(self, value: Tensor, n: int = 1) -> None:
        super().update(value * 2, n)


Use = Callable[[Any, Meter, Tensor], Any]


def by_method(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(meter.update, loss, 2)


def of_both(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(meter.update, loss)
    callback(kept.meter.update, loss, 3)


def by_partial(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(functools.partial(Meter.update, meter, n=2), loss)


def by_argument(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(Meter.update, kept.meter, loss)


def by_closure(kept: Any, meter: Meter, loss: Tensor) -> None:
    other = kept.meter
    callback(lambda value: (meter.update(value), other.update(value, 3)), loss)


def by_defaults(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(
        lambda value, m=meter, *, update=kept.meter.update: (m.update(value), update(value)), loss
    )


def by_tuple(kept: Any, meter: Meter, loss: Tensor) -> None:
    meters = (meter, (kept.meter,))
    callback(lambda value: (meters[0].update(value), meters[1][0].update(value, 2)), loss)


def with_tensors(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(lambda pair: pair[0].update(pair[1]), (meter, loss))


def reads_before(kept: Any, meter: Meter, loss: Tensor) -> Any:
    count = meter.count
    callback(meter.update, loss)
    return count


def asks_which(kept: Any, meter: Meter, loss: Tensor) -> Any:
    callback(meter.update, loss)
    return meter is kept.meter


def keeps_it(kept: Any, meter: Meter, loss: Tensor) -> None:
    kept.last = meter
    callback(meter.update, loss)


def decides(kept: Any, meter: Meter, loss: Tensor) -> None:
    callback(meter.update if loss > 0.4 else kept.meter.update, loss)


HELD: list[Use] = [by_method, of_both, by_partial, by_argument, by_closure, by_defaults, by_tuple]
OTHERS: list[Use] = [with_tensors, reads_before, asks_which, keeps_it, decides]


def each_epoch(kept: Any, call: int) -> None:
    if call % 3 == 0:
        kept.given, kept.meter = Meter(), Meter()


def exchanged(kept: Any, call: int) -> None:
    each_epoch(kept, call)
    kept.given, kept.meter = kept.meter, kept.given


def one_for_both(kept: Any, call: int) -> None:
    each_epoch(kept, call)
    if call == 4:
        kept.meter = kept.given


def of_another_class(kept: Any, call: int) -> None:
    each_epoch(kept, call)
    if call == 4:
        kept.given = Twice()


CHANGES = [each_epoch, exchanged, one_for_both, of_another_class]


def run(use: Use, change: Callable[[Any, int], None], compiled: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = SimpleNamespace(given=None, meter=None, last=None, said=[])

    def step(x: Tensor, meter: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), use(kept, meter, loss)

    used: Any = graphopt.compile(step) if compiled else step
    meters: list[Meter] = []
    left = []
    for call, x in enumerate(torch.randn(7, 5, 4)):
        change(kept, call)
        meters += [kept.given, kept.meter]
        loss, given = used(x, kept.given)
        left.append((loss.item(), given, [dict(vars(each)) for each in meters], list(kept.said)))
        left.append((kept.last is kept.given,))
    return left


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", [*HELD, *OTHERS])
def test_each_call_finds_the_objects_that_are_there(
    use: Use, change: Callable[[Any, int], None]
) -> None:
    assert run(use, change, True) == run(use, change, False)
