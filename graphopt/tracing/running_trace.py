"""The trace that is running, for values that belong to it (`graphopt.tracing.later`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from graphopt.host.context import while_set
from graphopt.tracing.numbers import refusal
from graphopt.tracing.shared_memory import SharedMemory


class TablesOutside(Protocol):
    """Lists and dictionaries outside a step to which each call writes by itself."""

    def row_method(self, row: Any, name: str) -> Callable[..., None] | None:
        """What is called as a method that changes a row of one; None of other values."""


class Trace(Protocol):
    """What values need of the trace that they belong to."""

    @property
    def arrays(self) -> TablesOutside:
        """The arrays and tables outside to which each call writes."""

    def decide(self, value: Any, kind: type) -> Any:
        """What a value is in this call; the graph holds where it is that again."""

    def text(self, value: Any) -> str:
        """What stands for a value that is a text."""

    def text_of(self, function: Callable[..., str], args: Sequence[Any]) -> str:
        """What stands for the text that a function gives when the graph has run."""

    def number_of(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What stands for the number that a function gives of numbers when the graph has run; None
        where something else is among them."""

    def memory_of(self, tensor: torch.Tensor) -> SharedMemory:
        """The memory of a tensor, in which an array lies from here on."""

    def of_graph(self, value: Any, index: bool = False) -> Any:
        """A value as the graph has it; see `GraphValues`."""

    def beside(self, function: Callable[[Any, Any], Any], tensor: torch.Tensor, value: Any) -> Any:
        """What an operator gives of a tensor and a value on its right; see `GraphValues`."""

    def known_number(self, number: Any) -> Any:
        """What stands for a float of numpy's, and computes with numbers of a graph."""

    def takes(self, value: Any) -> bool:
        """Whether a value is known to be a tensor that may be one of the graph."""

    def parts(self, text: str) -> Sequence[Any]:
        """Texts and values that a text is put together of."""

    def exact(self, value: Any) -> Any:
        """A text as it is in this call, for which the graph holds alone; others themselves."""


BEGIN, END = "\udc81", "\udc82"
"""What a piece of text that stands for a value begins and ends with."""
PIECE = re.compile(f"{BEGIN}(\\d+){END}")

_current: ContextVar[Trace | None] = ContextVar("trace", default=None)


def has_piece(value: Any) -> bool:
    """Whether a value is a text with a piece that stands for another one."""
    return isinstance(value, str) and BEGIN in value and PIECE.search(value) is not None


def is_running() -> bool:
    """Whether one is."""
    return _current.get() is not None


def current_trace() -> Trace:
    """The trace that is running."""
    found = _current.get()
    if found is None:
        raise refusal("it uses a value of a step whose trace is over", "make it in each call")
    return found


def values_of(trace: Trace) -> AbstractContextManager[None]:
    """While active, values belong to a trace."""
    return while_set(_current, trace)
