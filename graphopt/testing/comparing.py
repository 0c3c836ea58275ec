"""Bitwise comparison of a rewritten graph's values with the untouched graph's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RunValue:
    """One value that a run returns or leaves, with its initial value if it is state.

    Attributes:
        value: a tensor of its own, or a number.
        start: of state, what it was before the run.
        kind: of state, which: "parameter", "optimizer_state", …
    """

    value: Any
    start: torch.Tensor | None = None
    kind: str | None = None

    @property
    def change(self) -> Any:
        """The change of state, or the value itself: small updates of large weights must be right,
        too."""
        if self.start is None or not isinstance(self.value, torch.Tensor):
            return self.value
        return wide(self.value) - wide(self.start)


Values = Mapping[str, RunValue]


def difference(actual: RunValue, expected: RunValue) -> str | None:
    """Describes how two values differ, or returns None if they are equal bit for bit."""
    now, was = actual.value, expected.value
    if not isinstance(was, torch.Tensor):
        return None if now == was else f"{now!r} instead of {was!r}"
    other = other_kind(now, was)
    if other is not None:
        return other
    different = ~same_elements(now, was)
    if not bool(different.any()):
        return None
    gap = (wide(now) - wide(was)).abs()
    return extent(different, gap)


def other_kind(now: Any, was: torch.Tensor) -> str | None:
    """Describes a difference in dtype, device or shape, or returns None."""
    kinds = [(str(t.dtype), str(t.device), tuple(t.shape)) for t in (now, was)]
    return f"{kinds[0]} instead of {kinds[1]}" if kinds[0] != kinds[1] else None


def same_elements(now: torch.Tensor, was: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the elements that are equal or both NaN."""
    return (now == was) | ((now != now) & (was != was))


def extent(different: torch.Tensor, gap: torch.Tensor) -> str:
    """Describes how many elements differ, and by how much."""
    largest = float(gap.nan_to_num(torch.inf).max())
    count = f"{int(different.sum())} of {different.numel()} elements"
    return f"{count}, the largest difference is {largest:g}"


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Converts a tensor to double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def response(expected: Values, disturbed: Values) -> dict[str, float]:
    """Returns the largest change of each tensor between two runs, in proportion to its largest
    element (for state, its largest change)."""
    found = {}
    for where, value in expected.items():
        if isinstance(value.value, torch.Tensor):
            gap = (wide(disturbed[where].change) - wide(value.change)).nan_to_num(0.0)
            size = largest(value.change)
            found[where] = largest(gap) / size if size else 0.0
    return found


def largest(tensor: Any) -> float:
    """Returns the largest absolute value of an element; zero for empty tensors."""
    return float(wide(tensor).abs().nan_to_num(0.0).max()) if tensor.numel() else 0.0


_SAMPLE = 4096


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns some elements in double precision, of the same positions for all tensors of that
    size."""
    flat = tensor.flatten()
    if flat.numel() > _SAMPLE:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(flat.numel(), (_SAMPLE,), generator=generator).sort().values
        flat = flat[chosen.to(flat.device)]
    return wide(flat)
