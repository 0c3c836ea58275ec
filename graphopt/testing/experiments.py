"""Modified inputs of a step, each of which makes some term of its computation visible.

One run says little of a pass that changes numerics: a decay that is wrong by 0.2 % moves a weight
by less than rounding does. So both graphs also run with other data, with each hyperparameter much
larger, with a tiny learning rate, with optimizer state so large that gradients hardly matter, and
with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from graphopt.ir.metadata import input_kind

Purpose = Literal["base", "disturbed", "trial", "response", "fresh", "state", "elements", "finite"]

TRIALS = 4
"""Runs with other data, if the inputs are not large."""

_LARGE_BYTES = 1 << 28
_NOISE = 2.0**-9
"""The relative size of the noise on inputs: that of rounding to bfloat16."""

_STATE_FACTOR = 2.0**20
_TINY = 2.0**-10
_FACTORS = (4096.0, 16.0)
"""Factors for a hyperparameter; the largest with a finite result is used."""


@dataclass(frozen=True)
class Experiment:
    """One modified set of inputs, and the comparison it is for.

    Attributes:
        name: in words, after "with".
        purpose: how the results are compared: "base" and "trial" for the size of each change,
            "response" for the difference from the base, "fresh" for what becomes of state that was
            zero, "state" for changes that gradients hardly matter for, "elements" for single
            elements alone, "finite" for whether they are numbers. "disturbed" is for the untouched
            graph, to see what rounding makes of it.
        make: gives the inputs.
        instead: what to try where the untouched graph gives numbers that are not finite.
        is_kept: whether results are small enough to be kept for the next check.
    """

    name: str
    purpose: Purpose
    make: Callable[[], list[Any]]
    instead: Experiment | None = None
    is_kept: bool = True


def as_given(inputs: Sequence[Any]) -> Experiment:
    """Returns the experiment with unmodified inputs."""
    return Experiment("the inputs as given", "base", lambda: list(inputs))


class Experiments:
    """All experiments with one step.

    Args:
        placeholders: of its graph.
        inputs: one value for each; they stay as they are.
    """

    def __init__(self, placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
        self._kinds = [input_kind(node) for node in placeholders]
        self._names = [node.name for node in placeholders]
        self._inputs = list(inputs)

    def __iter__(self) -> Iterator[Experiment]:
        """Yields all experiments, first the one that measures rounding and the unmodified one."""
        yield self._new("inputs disturbed", "disturbed", self._disturbed)
        yield as_given(self._inputs)
        for number in range(1, 1 + (1 if self._are_large else TRIALS)):
            yield self._new(f"other data ({number})", "trial", partial(self._trial, number))
        for role, indices in self._hyperparameters().items():
            yield self._response(role, indices)
            if role == "lr":
                yield self._new("a tiny lr", "elements", partial(self._scaled, indices, _TINY))
        state = [i for i in self._of_kind("optimizer_state") if _has_size(self._inputs[i])]
        if state:
            for number in range(1, 1 + (1 if self._are_large else TRIALS)):
                fresh = partial(self._fresh, state, number)
                yield self._new(f"other data ({number}) and no state", "fresh", fresh)
            large = partial(self._large, state)
            yield self._new("large optimizer state", "state", large)
            zeros = partial(self._with_zeros, state)
            yield self._new("zeros among inputs and state", "finite", zeros)

    def _response(self, role: str, indices: Sequence[int]) -> Experiment:
        values = [abs(float(self._inputs[index])) for index in indices]
        factors = (0.75,) if all(0.5 <= value < 1 for value in values) else _FACTORS
        made: Experiment | None = None
        for factor in reversed(factors):
            name = f"{role} {factor:g} times as large"
            make = partial(self._scaled, indices, factor)
            made = self._new(name, "response", make, made)
        assert made is not None
        return made

    def _new(
        self,
        name: str,
        purpose: Purpose,
        make: Callable[[], list[Any]],
        instead: Experiment | None = None,
    ) -> Experiment:
        return Experiment(name, purpose, make, instead, not self._are_large)

    @property
    def _are_large(self) -> bool:
        """True if the inputs are so large that few runs must do, and offer samples enough."""
        tensors = (v for v in self._inputs if isinstance(v, torch.Tensor))
        return sum(tensor.nbytes for tensor in tensors) > _LARGE_BYTES

    def _of_kind(self, kind: str) -> list[int]:
        """Returns the positions of inputs of one kind."""
        return [index for index, other in enumerate(self._kinds) if other == kind]

    def _hyperparameters(self) -> dict[str, list[int]]:
        """Returns the positions of nonzero hyperparameters, by role."""
        found: dict[str, list[int]] = {}
        for index in self._of_kind("hyperparameter"):
            if isinstance(self._inputs[index], torch.Tensor) and float(self._inputs[index]) == 0:
                continue
            found.setdefault(_role(self._names[index]), []).append(index)
        return found

    def _scaled(self, indices: Sequence[int], factor: float) -> list[Any]:
        """Returns the inputs with some of them multiplied by `factor`."""
        chosen = set(indices)
        return [v * factor if i in chosen else v for i, v in enumerate(self._inputs)]

    def _disturbed(self) -> list[Any]:
        """Returns the inputs with small noise on all floats except optimizer state and
        hyperparameters."""
        kept = ("hyperparameter", "optimizer_state")
        generator = torch.Generator().manual_seed(0)
        return [
            v if kind in kept or not _is_float(v) else _disturbed(v, generator)
            for v, kind in zip(self._inputs, self._kinds, strict=True)
        ]

    def _trial(self, number: int) -> list[Any]:
        """Returns other data: floats times random numbers around one, batch integers rolled."""
        generator = torch.Generator().manual_seed(number)
        return [
            _other(v, kind, number, generator)
            for v, kind in zip(self._inputs, self._kinds, strict=True)
        ]

    def _fresh(self, state: Sequence[int], number: int) -> list[Any]:
        """Returns other data with optimizer state and weight decay zero, so that state depends on
        gradients alone."""
        made = self._trial(number)
        for index in (*state, *self._hyperparameters().get("weight_decay", ())):
            made[index] = made[index] * 0
        return made

    def _large(self, state: Sequence[int]) -> list[Any]:
        """Returns the inputs with large optimizer state, all elements different."""
        made, generator = list(self._inputs), torch.Generator().manual_seed(0)
        for index in state:
            value = made[index]
            factor = _STATE_FACTOR * (0.5 + torch.rand(value.shape, generator=generator))
            made[index] = value * factor.to(value.device, value.dtype)
        return made

    def _with_zeros(self, state: Sequence[int]) -> list[Any]:
        """Returns the inputs with zero state and half of each parameter and example zero, to reveal
        0 / 0."""
        made = self._scaled(state, 0.0)
        for index in (*self._of_kind("user_input"), *self._of_kind("parameter")):
            value = made[index]
            if _has_size(value) and value.shape[-1] > 1:
                made[index] = value.clone()
                made[index][..., : value.shape[-1] // 2] = 0
        return made


_SPREADS = {"parameter": 0.1, "gradient": 0.3, "user_input": 0.3, None: 0.3}
"""Relative standard deviation, by kind of input, of the random factors in a trial."""


def _other(value: Any, kind: str | None, number: int, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return value
    if not value.is_floating_point():
        batch = kind in ("user_input", None) and value.dim()
        moved = number * (1 + value.numel() // 7)
        return value.flatten().roll(moved).view(value.shape) if batch else value
    if kind not in _SPREADS:
        return value
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return value * (1 + _SPREADS[kind] * noise)


def _disturbed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(2, value.shape, generator=generator).to(value.device, value.dtype)
    return value.detach() * (1 + _NOISE * (2 * signs - 1))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _role(name: str) -> str:
    """Returns a hyperparameter's role: `weight_decay` for
    `optimizer_param_groups_0_weight_decay`."""
    _, groups, rest = name.partition("param_groups_")
    return rest.partition("_")[2] if groups else name


def _has_size(value: Any) -> bool:
    return _is_float(value) and value.dim() > 0
