"""Replace attributes of modules for the time of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any


def original(function: Any) -> Any:
    """What `function` stands for while a step is traced; itself if it stands for nothing else."""
    return (
        getattr(function, "stands_for", function)
        if isinstance(function, FunctionType)
        else function
    )


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """While active, each `(owner, name, value)` holds; then the former values do again."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for (owner, name, value), (_, _, former) in zip(changes, before, strict=True):
            if isinstance(value, FunctionType):
                vars(value)["stands_for"] = former
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def is_in(callee: Any, functions: frozenset[Any]) -> bool:
    """Whether a callee, which may have no hash, is among functions."""
    try:
        return callee in functions
    except TypeError:
        return False
