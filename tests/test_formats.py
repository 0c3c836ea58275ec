"""Texts of meters and other objects, against eager: fields of `str.format` that read attributes and
items, and widths of texts in which there are numbers of the graph."""

# ruff: noqa: UP031, UP032 - the ways to make text that are tested

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Meter:
    """That of torch's imagenet example, of 2017 and of today."""

    def __init__(self, name: str = "loss") -> None:
        self.name, self.val, self.avg, self.sum, self.count = name, 0.0, 0.0, 0.0, 0

    def update(self, val: float, n: int = 1) -> None:
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count

    @property
    def twice(self) -> float:
        return self.avg * 2

    def __str__(self) -> str:
        return "{name} {val:.4f} ({avg:.4f})".format(**self.__dict__)


@dataclass
class OfData(Meter):
    name: str = "loss"
    val: float = 0.0
    avg: float = 0.0
    sum: float = 0.0
    count: int = 0
    __str__ = object.__str__


class Named:
    def __init__(self, meter: Any) -> None:
        self.m = meter


SHOWN: dict[str, Callable[[Any, int], str]] = {
    "attributes": lambda m, i: "Epoch: [{0}] {x.val:.3f} ({x.avg:.3f})\t{1}".format(i, -i, x=m),
    "property": lambda m, i: "{m.twice:>{w}.4f} {{}} {m.avg!r:<30}".format(m=m, w=12),
    "item": lambda m, i: "{m[loss]:.3e} {0[1]}".format([i, m.val], m={"loss": m.avg}),
    "attributes as a dictionary": lambda m, i: "{avg:.4f} {name}".format_map(vars(m)),
    "bound": lambda m, i: (lambda form: form(i, m.val, m=m))("{:d} {} {m.name}".format),
    "names": lambda m, i: "{text} {args} {self.val}".format(text=i, args=m.name, self=m),
    "by the class": lambda m, i: str.format("{} {.avg}", i, m),
    "expanded": lambda m, i: "{} {m.avg} {}".format(*[i, m.val], **vars(Named(m))),
    "itself": lambda m, i: "{}: {!s:>30}|{!r:.5}|".format(i, m, m.val),
    "f-string": lambda m, i: f"{m!s:^40}|{[m.val, i]!r:>50}|{m}",
    "percent": lambda m, i: "%-30s|%5d|%.3f" % (m, i, m.avg),
    "percent of a tuple": lambda m, i: "%-30s|%5d|%.3f" % (lambda *values: values)(m, i, m.avg),
    "percent of one": lambda m, i: "%30s|" % m,
    "percent by name": lambda m, i: "%(m)30s|%(i)d" % {"m": m, "i": i},
}


def run(show: Callable[[Any, int], str], make: type, compiled: bool) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, meter: Any, count: int) -> str:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), 3)
        return show(meter, count)

    used: Any = graphopt.compile(step) if compiled else step
    meter, said = make(), []
    for call, x in enumerate(torch.randn(6, 5, 4)):
        if call == 3:
            meter = make()
        said.append(used(x, meter, call))
    return said, len(used.captures) if compiled else 0


@pytest.mark.parametrize("show", SHOWN)
def test_a_text_of_a_meter_made_anew_takes_one_graph(show: str) -> None:
    expected, _ = run(SHOWN[show], Meter, False)
    found, captures = run(SHOWN[show], Meter, True)
    assert found == expected
    assert captures <= 2  # the first call has no number for the count yet


def test_texts_of_data_classes() -> None:
    def show(meter: Any, count: int) -> str:
        return f"{meter!r:>100}" + "{m!r:<100}{m.avg}".format(m=meter) + "%-100r" % (meter,)

    expected, _ = run(show, OfData, False)
    assert run(show, OfData, True)[0] == expected


def test_what_a_field_reads_is_guarded() -> None:
    model, meter = nn.Linear(4, 4), Meter()

    @graphopt.compile
    def step(x: Tensor) -> tuple[Tensor, str]:
        return model(x), "{m.name}".format(m=meter)

    for name in ("loss", "loss", "accuracy"):
        meter.name = name
        assert step(torch.ones(2, 4))[1] == name


@pytest.mark.parametrize("text", ["{", "{0} {}", "{:{:{}}}", "{!x}", "{a[}", "{a.}", "{5}", "{b}"])
def test_a_malformed_text_is_an_error_of_the_step(text: str) -> None:
    model = nn.Linear(4, 4)

    @graphopt.compile
    def step(x: Tensor) -> tuple[Tensor, str]:
        try:
            return model(x), text.format(1, 2, a=3)
        except (ValueError, IndexError, KeyError, AttributeError) as error:
            return model(x), type(error).__name__

    with pytest.raises((ValueError, IndexError, KeyError, AttributeError)) as raised:
        text.format(1, 2, a=3)
    assert step(torch.ones(2, 4))[1] == raised.type.__name__
