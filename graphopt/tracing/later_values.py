"""What values are, or hold, that are computed when the graph has run; see `later`."""

from __future__ import annotations

from typing import Any

from graphopt import _compat
from graphopt.tracing.host_numbers import is_host_number
from graphopt.tracing.later import Later, as_later
from graphopt.tracing.nests import leaves_in
from graphopt.tracing.numbers import SYMBOLIC, refusal
from graphopt.tracing.running_trace import current_trace


def is_later(value: Any) -> bool:
    """Whether a value is computed when the graph has run, a text or another one."""
    return type(as_later(value)) is Later


def is_later_text(value: Any) -> bool:
    """Whether a value is a text in which something stands for values."""
    return isinstance(value, str) and is_later(value)


def is_number_later(value: Any) -> bool:
    """Whether a value is a number that is computed when the graph has run."""
    return type(value) is Later and value.is_number


def letters(text: str) -> list[str]:
    """The letters of a text that is made when the graph has run, as many as in this call."""
    return [current_trace().text(letter) for letter in as_later(text)]


def refuse_keys(value: Any) -> None:
    """Refuse a dictionary with a key in which something stands for a value."""
    if isinstance(value, dict) and any(map(is_later, value)):
        raise refusal(
            "a text with a number that the graph gives is a key",
            "let the key be a number that is known before the call, or keep the text as a value",
        )


def holds_unknown(value: Any, of_host: bool = False) -> bool:
    """Whether a value, or one in lists, tuples and dictionaries, is known only when the graph runs.

    Args:
        of_host: so are numbers and arrays that are known before.
    """

    def is_unknown(leaf: Any) -> bool:
        if isinstance(leaf, SYMBOLIC):
            return of_host or not is_host_number(leaf)
        return is_later(leaf) or _compat.is_fake(leaf)

    return any(map(is_unknown, leaves_in(value)))


def holds_later(value: Any) -> bool:
    """Whether a value, or one in lists, tuples and dictionaries, is computed when the graph has
    run."""
    return any(map(is_later, leaves_in(value)))
