"""What a training collects, reports in every so many-th step, and begins anew there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import graphopt

Do = Callable[[Any, float], object]


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def average(self) -> float:
        return self.total / self.count


class Kind(NamedTuple):
    """How something is collected, reported and begun anew."""

    begin: Callable[[], Any]
    collect: Do
    report: Callable[[Any], Any]
    anew: Callable[[Any], None]


def _sums(s: Any, loss: float) -> None:
    s.kept["loss"] += loss
    s.kept["n"] += 1


def _mean(s: Any, loss: float) -> None:
    count = s.counts["loss"]
    s.kept["loss"] = s.kept["loss"] * count / (count + 1) + loss / (count + 1)
    s.counts["loss"] = count + 1


def _divided(s: Any) -> str:
    for key in s.kept.keys():  # noqa: SIM118 - as loops are written
        s.kept[key] /= 2
    return f"{s.kept['loss']:.3f}"


def _clear(s: Any) -> None:
    s.kept.clear()


def _clear_both(s: Any) -> None:
    s.kept.clear()
    s.counts.clear()


def _clear_and_begin(s: Any) -> None:
    s.kept.clear()
    s.kept["n"] = 0
    s.kept["loss"] = 0.0


def _anew(make: Callable[[], Any]) -> Callable[[Any], None]:
    def put(s: Any) -> None:
        s.kept = make()

    return put


def _append(s: Any, loss: float) -> None:
    s.kept["loss"].append(loss)


def _means(s: Any) -> Any:
    return {key: float(np.mean(each)) for key, each in s.kept.items()}


def _update_both(s: Any, loss: float) -> None:
    s.kept["loss"].update(loss)
    s.kept["twice"].update(2 * loss)


def _last(s: Any, loss: float) -> None:
    if s.kept is None:
        s.kept = {"loss": loss}
    else:
        s.kept["loss"] = loss


def _sums_default() -> Any:
    return defaultdict(float)


def _lists() -> Any:
    return defaultdict(list)


def _meters() -> Any:
    return defaultdict(Meter)


KINDS = {
    "cleared": Kind(_sums_default, _sums, lambda s: list(s.kept.items()), _clear),
    "changed, then cleared": Kind(_sums_default, _sums, _divided, _clear),
    "cleared, then begun": Kind(_sums_default, _sums, lambda s: dict(s.kept), _clear_and_begin),
    "means": Kind(_sums_default, _mean, lambda s: sorted(s.kept.items()), _clear_both),
    "sums anew": Kind(_sums_default, _sums, lambda s: dict(s.kept), _anew(_sums_default)),
    "lists anew": Kind(_lists, _append, _means, _anew(_lists)),
    "lists cleared": Kind(_lists, _append, _means, _clear),
    "a meter anew": Kind(
        Meter, lambda s, loss: s.kept.update(loss), lambda s: s.kept.average, _anew(Meter)
    ),
    "meters anew": Kind(
        _meters,
        _update_both,
        lambda s: {key: each.average for key, each in s.kept.items()},
        _anew(_meters),
    ),
    "none again": Kind(lambda: None, _last, lambda s: dict(s.kept), _anew(lambda: None)),
    "a counter": Kind(
        Counter, lambda s, loss: s.kept.update(n=2), lambda s: dict(s.kept), lambda s: None
    ),
}


def left_by(kind: Kind, compiled: bool, inside: bool) -> list[Any]:
    """What is there after each call; it is begun anew within the step, or between two calls."""

    def step(s: Any, w: Tensor, x: Tensor) -> Tensor:
        loss = (w * x).square().sum()
        kind.collect(s, loss.item())
        s.step += 1
        if s.step % 3 == 0:
            s.reports.append(kind.report(s))
            if inside:
                kind.anew(s)
        return loss

    torch.manual_seed(0)
    s = SimpleNamespace(kept=kind.begin(), counts=defaultdict(int), reports=[], step=0)
    run = graphopt.compile(step, pipeline="none") if compiled else step
    w, left = torch.randn(3), []
    for _ in range(8):
        loss = run(s, w, torch.randn(3)).item()
        left.append([loss, shown(s.kept), dict(s.counts), list(s.reports)])
        if s.step % 3 == 0 and not inside:
            kind.anew(s)
    return left


def shown(kept: Any) -> Any:
    if isinstance(kept, Meter):
        return vars(kept).copy()
    if isinstance(kept, dict):
        return type(kept), [(key, shown(each)) for key, each in kept.items()]
    return list(kept) if isinstance(kept, list) else kept


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_begun_anew(name: str, inside: bool) -> None:
    kind = KINDS[name]
    assert left_by(kind, True, inside) == left_by(kind, False, inside)


def test_few_graphs_serve_what_is_begun_anew() -> None:
    def step(s: Any, x: Tensor) -> Tensor:
        s.kept["loss"] += x.sum().item()
        s.step += 1
        if s.step % 3 == 0:
            s.reports.append(dict(s.kept))
            s.kept.clear()
        return x

    s = SimpleNamespace(kept=defaultdict(float), reports=[], step=0)
    run = graphopt.compile(step, pipeline="none")
    for _ in range(15):
        run(s, torch.ones(2))
    assert s.reports == [{"loss": 6.0}] * 5
    assert len(run.captures) == 3  # where nothing is there, where something is, and that reports
