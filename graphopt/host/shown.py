"""What functions that a step calls show of containers outside, where these have changed by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

AS_IT_IS: Any = object()
"""In place of a copy: the container itself is shown."""


class Shown:
    """Containers, each with copies of what it was when it was shown, in order."""

    def __init__(self, containers: Iterable[tuple[Any, Any]]) -> None:
        self._copies: dict[int, tuple[Any, deque[Any]]] = {}
        for container, copied in containers:
            self._copies.setdefault(id(container), (container, deque()))[1].append(copied)

    def next(self, container: Any) -> Any:
        """What is shown in place of a container, which is shown once more."""
        _, copies = self._copies.get(id(container), (None, None))
        copied = copies.popleft() if copies else AS_IT_IS
        return container if copied is AS_IT_IS else copied


NOTHING_SHOWN = Shown(())
"""Containers are shown as they are."""
