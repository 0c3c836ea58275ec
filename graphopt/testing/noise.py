"""The rounding tolerance of a step, measured as its response to slightly disturbed inputs."""

from __future__ import annotations

from typing import Any

import torch

from graphopt.testing.comparing import RunValue, Values, other_kind, wide

_ALIKE = 0.5
"""The scatter relative to a noise level up to which that level explains it."""

_FEW = 4
"""The number of tensors from which all levels are considered."""

ROUNDING_ALONE = 0.1
"""The relative response to the smallest noise from which a tensor counts as rounding error."""


class Noise:
    """The response of the untouched graph to disturbed inputs, at several levels.

    Attributes:
        of: by tensor, the largest change in proportion to the largest element, at the chosen level.
        smallest: the same at the smallest level.
        fresh: of the first run with no state, what the untouched graph gives.
        rounding: tensors that are hardly more than rounding errors where there is no state.
    """

    def __init__(self) -> None:
        self.fresh: Values = {}
        self.rounding: set[str] = set()
        self._levels: list[dict[str, tuple[float, float]]] = []
        self.of: dict[str, float] = {}
        self.smallest: dict[str, float] = {}

    def add(self, expected: Values, disturbed: Values) -> None:
        """Adds a run with inputs disturbed more than in the last one."""
        found = {}
        for where, value in expected.items():
            if isinstance(value.value, torch.Tensor) and value.value.numel():
                gap = (wide(disturbed[where].change) - wide(value.change)).abs().nan_to_num(0.0)
                found[where] = _proportion(value, disturbed[where]), float(gap.median())
        self._levels.append(found)

    def add_fresh(self, disturbed: Values) -> None:
        """Adds a run without optimizer state whose inputs are disturbed least."""
        for where, value in disturbed.items():
            expected = self.fresh.get(where)
            if expected is not None and _proportion(expected, value) > ROUNDING_ALONE:
                self.rounding.add(where)

    def choose(self, expected: Values, actual: Values) -> None:
        """Chooses the smallest level that explains the scatter of half of the tensors, else the
        largest. With few tensors, which one mistake may dominate, only the two smallest are
        considered."""
        gaps = {
            where: float((wide(actual[where].change) - wide(value.change)).abs().median())
            for where, value in expected.items()
            if where in self._levels[0] and other_kind(actual[where].value, value.value) is None
        }
        for number, level in enumerate(self._levels):
            ratios = sorted(gap / level[where][1] for where, gap in gaps.items() if level[where][1])
            self.of = {where: most for where, (most, _) in level.items()}
            if not ratios or ratios[len(ratios) // 2] <= _ALIKE:
                break
            if len(ratios) < _FEW and number:
                break
        self.smallest = {where: most for where, (most, _) in self._levels[0].items()}


def _proportion(was: RunValue, now: RunValue) -> float:
    """Returns the largest difference between two changes of a tensor, relative to the largest
    change."""
    if not isinstance(was.value, torch.Tensor) or not was.value.numel():
        return 0.0
    size = largest(was.change)
    gap = (wide(now.change) - wide(was.change)).nan_to_num(0.0)
    return largest(gap) / size if size else 0.0


def largest(tensor: Any) -> float:
    """Returns the largest absolute value of an element; zero for empty tensors."""
    return float(wide(tensor).abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0
