"""What is so in one thread while a block of it runs: values of context variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")


@contextmanager
def while_set(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """While active, a context variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
