"""Refusal of steps that ask for the identity of a storage: `data_ptr`, `id`, `hash`, `_cdata`.

The storage of a stand-in has another identity than the one that the step knows, and none in later
calls. Nobody sees how functions of C call each other, `map(methodcaller("data_ptr"), storages)`. So
the classes themselves refuse to answer while a step runs; torch is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphopt._compat import storages
from graphopt._compat.threads import is_of_trace
from graphopt.ir.user_frames import is_asked_by_torch
from graphopt.tracing.interception.replaced_functions import calling_frame, replaced
from graphopt.tracing.refusals.unknown_features import refuse_address


@contextmanager
def identities_refused() -> Iterator[None]:
    """While active, storages refuse to tell their identity.

    Raises:
        CaptureError: it does.
    """
    methods = [
        (owner, name, _refusing(getattr(owner, name)))
        for owner in storages.STORAGES
        for name in storages.METHODS
    ]
    numbers = [(owner, name, _number(getattr(owner, name))) for owner, name in storages.NUMBERS]
    with replaced(*methods, *numbers):
        yield


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    def ask(storage: Any) -> Any:
        if not is_asked_by_torch(calling_frame()):
            refuse_address()
        return method(storage)

    return ask


def _number(attribute: Any) -> property:
    def ask(owner: Any) -> Any:
        if is_of_trace() and not is_asked_by_torch(sys._getframe(1)):
            refuse_address()
        return attribute.__get__(owner)

    return property(ask)
