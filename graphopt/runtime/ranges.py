"""Ranges that torch's profiler shows for graphopt, beside operators and kernels."""

from __future__ import annotations

STEP = "graphopt.step"
"""The range of one call of a captured step."""
