"""Option values as text."""

from __future__ import annotations

import math
from typing import Any


def literal(value: Any) -> str:
    """Returns a value as a Python literal, or ``inf`` and ``nan``; otherwise its `repr`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if type(value) is list:
        return f"[{', '.join(map(literal, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    return repr(value)


def has_literal(value: Any) -> bool:
    """True if the text that `literal` gives means the value."""
    if type(value) in (list, tuple):
        return all(map(has_literal, value))
    return value is None or type(value) in (bool, int, float, str)
