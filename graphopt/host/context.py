"""Values of context variables within a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")


@contextmanager
def while_set(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """While active, a context variable has this value in the current thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
