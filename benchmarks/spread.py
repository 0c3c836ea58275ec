"""Median and quartiles of repeated measurements."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

Figures = dict[str, Any]


def spread(values: list[float]) -> Figures:
    """The median and the quartiles of values."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "quartiles": [low, high]}
