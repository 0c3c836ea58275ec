"""The factor by which a tensor is multiplied, as far as the noise of rounding shows it.

Rounding moves each element by an amount of its own, about as often up as down. A mistake (a factor
of 1.002 in a decay) moves all alike. So the mean of the ratios of elements, now to before, is
compared with how much they scatter, as a t-test does: fp8 in place of float32 scatters by 4 % and
has a mean near one; a factor of 1.002 has a mean of 1.002 and scatters by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

FLOOR = 5e-4
"""How far from one a factor may be, however exactly it is known."""

_MOST_ALLOWED = 0.25
"""However much ratios scatter, and however few they are."""

_FEWEST = 3
"""Independent values of which the mean says something."""

_PER_UNIT = 1000
"""Elements whose sizes differ by less than this part are no independent values: rounding treats
them alike."""


class Factor(NamedTuple):
    """A factor that was measured.

    Attributes:
        value: the mean of the ratios.
        spread: how far ratios are from it, as a standard deviation.
        allowed: how far from one the mean may be, with such a spread of so many values.
        values: how many values are independent.
    """

    value: float
    spread: float
    allowed: float
    values: int

    @property
    def is_one(self) -> bool:
        """True if rounding explains how far the factor is from one."""
        return abs(self.value - 1) <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.value:.6g} times what it was ({self.values} independent values, which scatter"
            f" by {self.spread:.1e}; allowed is 1 ± {self.allowed:.1e})"
        )


def measured(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Factor | None:
    """The factor between what was and what is, of several runs; None where it cannot be told.

    Args:
        pairs: (was, now), flat and in double precision.
    """
    found = [scaled for was, now in pairs if (scaled := _scaled(was, now)) is not None]
    if not found:
        return None
    was, now = (torch.cat(parts) for parts in zip(*found, strict=True))
    weight = was.abs().clamp(max=1) ** 2
    ratio = now / was
    total = weight.sum()
    mean = (weight * ratio).sum() / total
    rest = weight * (ratio - mean)
    clusters = _clusters(was)
    many = int(clusters.max()) + 1
    sums = torch.zeros(many, dtype=torch.float64).index_add_(0, clusters, rest)
    weights = torch.zeros(many, dtype=torch.float64).index_add_(0, clusters, weight)
    count = float(total**2 / (weights**2).sum())
    if count < _FEWEST:
        return None
    spread = float((rest * (ratio - mean)).sum() / total) ** 0.5
    error = float((sums**2).sum() / total**2 * count / (count - 1)) ** 0.5
    allowed = FLOOR + _critical(count - 1) * error + 2 * spread**2
    return Factor(float(mean), spread, min(allowed, _MOST_ALLOWED), int(count))


def _scaled(was: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both in units of the median size, so that runs weigh alike; elements that are nothing are
    left out."""
    used = was.isfinite() & (was != 0)
    if not bool(used.any()):
        return None
    was, now = was[used], now[used].nan_to_num(torch.inf)
    unit = was.abs().median()
    return was / unit, now / unit


def _clusters(was: torch.Tensor) -> torch.Tensor:
    """A number for each element, equal for elements of nearly the same value."""
    keys = (was.abs().log() * _PER_UNIT).round() * 2 + (was > 0)
    numbers: torch.Tensor = keys.unique(return_inverse=True)[1]
    return numbers


def _critical(freedom: float) -> float:
    """How many standard errors a mean is away by chance once in ten million times, nearly: what
    Student's t says."""
    return float(5.5 + 1200 * freedom**-2.27)


_ROUGHLY, _MOST = 0.1, 0.9


def typical(was: torch.Tensor, now: torch.Tensor) -> float | None:
    """The factor, other than one, that nine of ten elements share nearly; None if there is none."""
    was, now = was.flatten(), now.flatten()
    large = was.abs() > 0.01 * was.abs().max() if was.numel() else was.bool()
    if not bool(large.any()):
        return None
    ratios = now[large] / was[large]
    middle = float(ratios.median())
    near = (ratios - middle).abs() <= _ROUGHLY * abs(middle)
    return middle if float(near.double().mean()) >= _MOST and abs(middle - 1) > FLOOR else None
