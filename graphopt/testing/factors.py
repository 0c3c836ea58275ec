"""Statistical tests for a wrong factor or offset that rounding noise would hide.

Rounding moves each element by an amount of its own, about as often up as down. A mistake (a factor
of 1.002 in a decay) moves all alike. So the mean of the ratios of elements, now to before, is
compared with its standard error, as Student's t-test does (The Probable Error of a Mean, Biometrika
6, 1908): fp8 in place of float32 scatters by 4 % and has a mean near one; a factor of 1.002 has a
mean of 1.002 and scatters by nothing. Nearly equal values are rounded alike and count as one: the
standard error is that of clusters (Liang and Zeger, Biometrika 73, 1986).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch

FLOOR = 5e-4
"""The tolerance of a factor, however precisely it was measured."""

_FEWEST = 3
"""The least number of independent values for a mean."""

_PER_UNIT = 1000
"""Values within this relative resolution count as one sample, since rounding treats them alike."""

_MANY, _MOSTLY, _OFFSET = 16, 0.5, 0.01
"""The least independent values for an offset; the largest imbalance of signs with which an offset
differs from a factor; and its tolerance, in medians."""

_BLOCKS = 8
"""The number of blocks of rows that are tested separately."""

Runs: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""(was, now) of several runs, flat and in double precision."""


class Factor(NamedTuple):
    """A measured factor between expected and actual values, with its tolerance.

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
        """True if rounding explains the factor's distance from one."""
        return abs(self.value - 1) <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.value:.6g} times what it was ({self.values} independent values, which scatter"
            f" by {self.spread:.1e}; allowed is 1 ± {self.allowed:.1e})"
        )


def problem_of_runs(pairs: Runs) -> str | None:
    """Describes how runs of a rewritten graph differ beyond rounding from the untouched one, or
    returns None."""
    if all(torch.equal(now.where(was != 0, 0.0), was) for was, now in pairs):
        return None
    factor = measured(pairs)
    if factor is not None and not factor.is_one:
        return f"it changes {factor}"
    for number, block in enumerate(_blocks(pairs), 1):
        factor = measured(block)
        if factor is not None and not factor.is_one:
            return f"part {number} of {_BLOCKS} of its rows changes {factor}"
    added = offset(pairs)
    if added is not None and not added.is_one:
        part = f"{added.value - 1:.2g} times their median size"
        return f"to all elements {part} is added (allowed is {added.allowed:.1e})"
    return None


def _blocks(pairs: Runs) -> Iterator[Runs]:
    """Yields the runs restricted to blocks of rows, since single blocks may be wrong."""
    if pairs[0][0].numel() < _BLOCKS**2:
        return
    parts = [(was.chunk(_BLOCKS), now.chunk(_BLOCKS)) for was, now in pairs]
    for number in range(len(parts[0][0])):
        yield [(was[number], now[number]) for was, now in parts]


def measured(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Factor | None:
    """Measures the factor between expected and actual values of several runs; None if there are too
    few.

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
    return Factor(float(mean), spread, FLOOR + _critical(count - 1) * error, int(count))


def offset(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Factor | None:
    """Measures a constant added to all elements, in units of their median size, plus one. None if
    the signs are too uneven or the values too few; rounding to nearest adds none."""
    found = [scaled for was, now in pairs if (scaled := _scaled(was, now)) is not None]
    if not found:
        return None
    was, now = (torch.cat(parts) for parts in zip(*found, strict=True))
    added = (now - was).clamp(-1, 1)
    count = int(_clusters(was).max()) + 1
    if count < _MANY or abs(float(was.sign().mean())) > _MOSTLY:
        return None
    mean, spread = float(added.mean()), float(added.std())
    allowed = _OFFSET + _critical(count - 1) * spread / count**0.5
    return Factor(1 + mean, spread, allowed, count)


def _scaled(was: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales both tensors by the expected median size and drops zeros; None if nothing is left.
    Single numbers are not scaled."""
    used = was.isfinite() & (was != 0)
    if not bool(used.any()):
        return None
    was, now = was[used], now[used].nan_to_num(torch.inf)
    unit = was.abs().median() if was.numel() > 1 else 1.0
    return was / unit, now / unit


def _clusters(was: torch.Tensor) -> torch.Tensor:
    """Numbers the elements so that nearly equal values share a number and count as one sample."""
    keys = (was.abs().log() * _PER_UNIT).round() * 2 + (was > 0)
    numbers: torch.Tensor = keys.unique(return_inverse=True)[1]
    return numbers


def _critical(freedom: float) -> float:
    """Approximates Student's t: the standard errors that a mean exceeds by chance once in ten
    million times."""
    return float(5.5 + 1200 * freedom**-2.27)


_ROUGHLY, _MOST = 0.1, 0.9


def typical(was: torch.Tensor, now: torch.Tensor) -> float | None:
    """Returns the factor, other than one, that nine of ten elements nearly share, or None."""
    was, now = was.flatten(), now.flatten()
    large = was.abs() > 0.01 * was.abs().max() if was.numel() else was.bool()
    if not bool(large.any()):
        return None
    ratios = now[large] / was[large]
    middle = float(ratios.median())
    near = (ratios - middle).abs() <= _ROUGHLY * abs(middle)
    return middle if float(near.double().mean()) >= _MOST and abs(middle - 1) > FLOOR else None


_ENOUGH, _NONE, _CLEARLY = 8, 0.01, 0.25
"""The least number of elements whose common factor is no coincidence; the factor up to which they
are lost, as small values are in few bits; and the least distance from one that is a mistake."""


def multiplied(was: torch.Tensor, now: torch.Tensor) -> str | None:
    """Describes a common factor in values that are mostly rounding error, or returns None."""
    factor = typical(was, now) if was.numel() >= _ENOUGH else None
    if factor is None or abs(factor) <= _NONE or abs(factor - 1) <= _CLEARLY:
        return None
    return f"it changes {factor:.6g} times as much as it did, in nearly all elements"
