"""The cases of the coverage set: training loops of public kinds, in a small size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import nn

STEPS = 4


@dataclass
class Case:
    """A training step with its arguments.

    Attributes:
        step: the user's function, unchanged.
        calls: the arguments of each call.
        state: what is compared afterwards besides the results: whatever `tensors_of` knows.
        after: called after each call with its number and result, as a training loop goes on.
    """

    step: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    state: Sequence[Any] = ()
    after: Callable[[int, Any], None] | None = None


Build = Callable[[], Case]
_CASES: dict[str, Build] = {}
_REFUSED: dict[str, str] = {}
_CURED: dict[str, Build] = {}


def case(build: Build) -> Build:
    """Registers a case under the name of the function that builds it."""
    _CASES[_name(build)] = build
    return build


def refused(reason: str) -> Callable[[Build], Build]:
    """Registers a case that graphopt refuses for a reason; its cured form is registered beside
    it."""

    def enter(build: Build) -> Build:
        _REFUSED[_name(build)] = reason
        return case(build)

    return enter


def cured(build: Build) -> Build:
    """Registers the cured form of a refused case, named with `_cured` behind: the lines that the
    message names are changed as it says."""
    _CURED[_name(build).removesuffix("_cured")] = build
    return build


def _name(build: Build) -> str:
    return f"{build.__module__.rpartition('.')[2]}.{build.__name__}"


def cases() -> dict[str, Build]:
    """All registered cases by name, as people publish them."""
    return dict(_CASES)


def refusals() -> dict[str, str]:
    """The refused cases by name, each with a part of the reason."""
    return dict(_REFUSED)


def cured_cases() -> dict[str, Build]:
    """The cured forms of refused cases, by the refused case's name."""
    return dict(_CURED)


Step = Callable[..., Any]


def trains_all(
    make: Callable[[], tuple[Any, ...]],
    draw: Callable[[], tuple[Any, ...]],
    schedule: Callable[[Any], Any] | None = None,
    *,
    numbered: bool = False,
    name: str = "",
) -> Callable[[Step], Step]:
    """Registers a step as a case.

    Args:
        make: makes what every call is given first, and what is compared afterwards.
        draw: makes what each call is given on top.
        schedule: makes a schedule of the last object of `make`, an optimizer; the training loop
            advances it after each call.
        numbered: each call is given its number as well.
        name: of the case, where several have this step; otherwise the step's.
    """

    def enter(step: Step) -> Step:
        def build() -> Case:
            fixed = make()
            rates = schedule and schedule(fixed[-1])
            after = rates and (lambda index, result: rates.step())
            calls = repeated(*fixed, draw=draw)
            if numbered:
                calls = [(*call, number) for number, call in enumerate(calls)]
            return Case(step, calls, fixed, after)

        build.__name__, build.__module__ = name or step.__name__, step.__module__
        case(build)
        return step

    return enter


def trains(
    model: Callable[[], nn.Module],
    optimizer: Callable[..., Any],
    draw: Callable[[], tuple[Any, ...]],
    schedule: Callable[[Any], Any] | None = None,
    *,
    numbered: bool = False,
    name: str = "",
    **options: Any,
) -> Callable[[Step], Step]:
    """Registers a step of one model and an optimizer of its parameters, made with `options`."""

    def make() -> tuple[Any, ...]:
        made = model()
        return made, optimizer(made.parameters(), **options)

    return trains_all(make, draw, schedule, numbered=numbered, name=name)


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def repeated(
    *fixed: Any, draw: Callable[[], tuple[Any, ...]], steps: int = STEPS
) -> list[tuple[Any, ...]]:
    """The arguments of each call: `fixed`, then what `draw` returns."""
    return [(*fixed, *draw()) for _ in range(steps)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a module, optimizer or nested value, in a fixed order; numbers, numpy's arrays
    and printed texts are made tensors."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, torch.nn.Module):
        for table in (value.parameters(), value.buffers()):
            for tensor in table:
                yield from tensors_of(tensor)
    elif hasattr(value, "state_dict"):
        yield from tensors_of(value.state_dict())
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, numpy.ndarray):
        yield torch.from_numpy(value)
    elif isinstance(value, io.StringIO):
        yield torch.tensor(list(value.getvalue().encode()))
