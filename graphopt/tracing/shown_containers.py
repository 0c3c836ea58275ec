"""What a step shows of containers outside in the call that is captured.

What such a call alone changes outside (a list that it empties for good) is done before its graph
runs. A container that it has shown by then is shown as it was when the step came there; further
calls show it as they find it.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

from graphopt.host.shown import AS_IT_IS
from graphopt.tracing.later_values import holds_unknown

_OF_PYTHON = (Counter, OrderedDict, defaultdict)


def as_it_is(container: Any) -> Any:
    """A copy of a container and of those in it; `AS_IT_IS` where it is of another class, or holds
    what only the graph knows."""
    if holds_unknown(container, of_host=True):
        return AS_IT_IS
    try:
        return _copied(container)
    except (RecursionError, TypeError):  # one in itself
        return AS_IT_IS


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(map(_copied, value))
    if kind is deque:
        return deque(map(_copied, value), value.maxlen)
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if kind in _OF_PYTHON:
        return copy.copy(value)
    if isinstance(value, (list, tuple, set, dict, deque)):
        raise TypeError
    return value
