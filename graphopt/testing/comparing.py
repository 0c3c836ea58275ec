"""Are the values that a rewritten graph leaves those of the untouched graph?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = 1e-2
"""Of passes that change numerics: what each element may differ by, in proportion to the sum of its
own size (of state: of its change) and the largest in its tensor."""

_NOISE = 2
"""How often more than by a small disturbance of the inputs a tensor may change."""


@dataclass(frozen=True)
class Value:
    """One thing that a run gives.

    Attributes:
        value: a tensor of its own, or a number.
        start: of state, what it was before the run.
    """

    value: Any
    start: torch.Tensor | None = None

    @property
    def change(self) -> Any:
        """The value, or how far state went: small updates of large weights are to be right, too."""
        if self.start is None or not isinstance(self.value, torch.Tensor):
            return self.value
        return _wide(self.value) - _wide(self.start)


Values = Mapping[str, Value]


def difference(actual: Value, expected: Value) -> str | None:
    """How two values differ, in words; None where they are the same bit for bit."""
    return _difference(actual, expected, None)


def rough_difference(actual: Value, expected: Value, disturbed: Value) -> str | None:
    """How two values differ by more than rounding; None where they do not.

    Args:
        disturbed: what the untouched graph gives for inputs that differ in the last bits of a
            bfloat16. Where that is much (a gradient of nothing but rounding errors, which Adam
            makes large), as much is allowed, but for a constant factor: rounding makes none.
    """
    found = _difference(actual, expected, disturbed)
    if found is None and _is_multiple(actual, expected):
        return _difference(actual, expected, None)
    return found


def _is_multiple(actual: Value, expected: Value) -> bool:
    value = expected.value
    if not isinstance(value, torch.Tensor) or value.numel() < _ENOUGH:
        return False
    factor = constant_factor(actual, expected)
    return factor is not None and abs(factor) > TOLERANCE


_ROUGHLY, _MOST = 0.1, 0.9

_ENOUGH = 8
"""Elements that hardly have one factor in common by chance."""


def constant_factor(actual: Value, expected: Value, *, roughly: bool = False) -> float | None:
    """By what constant other than one all elements, of state their changes, are multiplied; None
    if there is no such constant.

    Args:
        roughly: nine of ten elements will do, as where they were sent in few bits.
    """
    if not isinstance(expected.value, torch.Tensor) or not expected.value.is_floating_point():
        return None
    was, now = expected.change.flatten(), actual.change.flatten()
    large = was.abs() > TOLERANCE * was.abs().max() if was.numel() else was.bool()
    if not bool(large.any()):
        return None
    ratios = now.to(was.dtype)[large] / was[large]
    middle = float(ratios.median())
    allowed, share = (_ROUGHLY, _MOST) if roughly else (TOLERANCE, 1.0)
    near = (ratios - middle).abs() <= allowed * abs(middle)
    if float(near.double().mean()) < share:
        return None
    return middle if abs(middle - 1) > 2 * TOLERANCE else None


def _difference(actual: Value, expected: Value, disturbed: Value | None) -> str | None:
    now, was = actual.value, expected.value
    if not isinstance(was, torch.Tensor):
        return None if now == was else f"{now!r} instead of {was!r}"
    kinds = [(str(t.dtype), str(t.device), tuple(t.shape)) for t in (now, was)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    same = (now == was) | ((now != now) & (was != was))
    if bool(same.all()):
        return None
    gap = (_wide(now) - _wide(was)).abs()
    if disturbed is not None and bool((same | (gap <= _allowed(expected, disturbed))).all()):
        return None
    largest = float(gap.nan_to_num(torch.inf).max())
    return f"{int((~same).sum())} of {same.numel()} elements, the largest difference is {largest:g}"


def _allowed(expected: Value, disturbed: Value) -> torch.Tensor:
    size = _wide(expected.change).abs()
    noise = (_wide(disturbed.value) - _wide(expected.value)).abs().nan_to_num(0.0)
    rounding = _wide(expected.value).abs() * _last_bits(expected.value)
    return TOLERANCE * (size + size.nan_to_num(0.0).max()) + _NOISE * noise.max() + rounding


def _last_bits(tensor: torch.Tensor) -> float:
    return 4 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
