"""Notes of passes that explain why they changed nothing, or less than expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_given: ContextVar[list[str] | None] = ContextVar("_given", default=None)


def note(text: str) -> None:
    """Adds to the running pass's record why it does nothing, or less than expected.

    A pass calls it, several times if need be; elsewhere it does nothing.

    Args:
        text: a line, which names nodes, parameters or lines of the user's program.

    >>> import graphopt, torch
    >>> @graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
    ... def move_waits(gm) -> int:
    ...     graphopt.note("the graph has no collectives")
    ...     return 0
    >>> step = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> move_waits(step.graph_module).note
    'the graph has no collectives'
    """
    notes = _given.get()
    if notes is not None and text not in notes:
        notes.append(text)


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collects notes while it is active."""
    notes: list[str] = []
    token = _given.set(notes)
    try:
        yield notes
    finally:
        _given.reset(token)
