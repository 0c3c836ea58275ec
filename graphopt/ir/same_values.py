"""Equality of plain values as programs see it: 1, 1.0 and True differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def same_value(now: Any, before: Any, by_value: Callable[[Any], bool]) -> bool:
    """True if two values are one object, or plain values with which a program computes the same.

    1, 1.0 and True differ, and so do 0.0 and -0.0; NaN is NaN.

    Args:
        by_value: whether a value is compared by value; all others are by identity.
    """
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple) and (type(now) is tuple or by_value(now)):
        return len(now) == len(before) and all(
            same_value(one, other, by_value) for one, other in zip(now, before, strict=True)
        )
    if not (by_value(now) and by_value(before)):
        return False
    if isinstance(now, complex):
        return _same_float(now.real, before.real) and _same_float(now.imag, before.imag)
    if isinstance(now, float) or getattr(getattr(now, "dtype", None), "kind", "") == "f":
        return _same_float(now, before)
    return bool(now == before)


def _same_float(now: Any, before: Any) -> bool:
    if now == 0.0 == before:
        return math.copysign(1.0, now) == math.copysign(1.0, before)
    return bool(now == before or (now != now and before != before))
