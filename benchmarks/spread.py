"""Figures of several runs, and how a table shows them."""

from __future__ import annotations

from statistics import median, quantiles
from typing import Any

Row = tuple[str, str]
Figures = dict[str, Any]


def spread(values: list[float]) -> Figures:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "quartiles": [low, high]}


def show_spread(found: Figures, pairs: int, unit: str = "") -> str:
    """As a table shows it."""
    low, high = found["quartiles"]
    return f"{found['median']:.3f}{unit}  (quartiles {low:.3f} to {high:.3f}, {pairs} pairs)"
