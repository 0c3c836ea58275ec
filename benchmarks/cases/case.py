"""The cases of the coverage set: training loops of public kinds, in a small size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

STEPS = 4


@dataclass
class Case:
    """A training step with its arguments.

    Attributes:
        step: the user's function, unchanged.
        calls: the arguments of each call.
        state: what is compared afterwards besides the results: modules, optimizers, tensors.
        after: called after each call with its number and result, as a training loop goes on.
    """

    step: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    state: Sequence[Any] = ()
    after: Callable[[int, Any], None] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)


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


def repeated(*fixed: Any, draw: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The arguments of each call: `fixed`, then what `draw` returns."""
    return [(*fixed, *draw()) for _ in range(STEPS)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a module, optimizer or nested value, in a fixed order."""
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
