"""Constants that steps of `outside_cases` read from another module."""

from __future__ import annotations

import os

SCALE = 0.5
IMPORTED = 0.5
FACTORS = {"a": {"b": [0.5, 1.0]}}


def from_environment() -> float:
    return float(os.environ["GRAPHOPT_TEST_SCALE"])


def scale() -> float:
    return SCALE
