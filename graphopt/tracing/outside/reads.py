"""The outside places that one trace reads, with the values found."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Set
from itertools import count
from typing import Any, NoReturn

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.effects.reads_behind_callbacks import ReadsBehindCallbacks
from graphopt.tracing.outside.changed_containers import PUT_BACK, ContainerChanges
from graphopt.tracing.outside.places import (
    MISSING,
    OutsidePlace,
    OutsideRead,
    bytes_in,
    is_bytes,
    is_read,
    is_value,
    key_text,
)
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.scalars.host_numbers import is_host_number
from graphopt.tracing.scalars.numbers import SYMBOLIC, refusal

_SINGLY = 1000
"""The items of larger containers are guarded together."""
_AT_MOST = 100_000
_TABLES = (dict, types.MappingProxyType)
_SEVERAL = (tuple, frozenset)


class OutsideReads(ContainerChanges):
    """Records the outside reads of one trace.

    Args:
        inputs: places that are inputs of the graph, by their identities.

    Attributes:
        refused: why no later call could do what it does to a container.
        reads_array: told of each array that it reads.
        behind: what it reads behind calls of functions on the host; None before the first.
    """

    def __init__(self, own: Iterable[dict[str, Any]], inputs: Set[Any]) -> None:
        super().__init__(own)
        self.reads_array: Callable[[Any], object] = of_none
        self.groups: dict[int, Any] = {}
        self.real_groups: dict[int, Any] = {}
        self._inputs = inputs
        self.refused: CaptureError | None = None
        self._written: set[tuple[Any, ...]] = set()
        self.reads: dict[tuple[Any, ...], OutsideRead] = {}
        self._own_reads: dict[tuple[Any, ...], OutsideRead] = {}
        self.advanced: tuple[str, SourceLine] | None = None
        self.behind: ReadsBehindCallbacks | None = None

    def read(self, place: OutsidePlace, path: str, line: SourceLine) -> Any:
        """Records that the step reads a place. Returns what is there."""
        value = place.now()
        identity = place.identity
        if self.behind is not None:
            self.behind.reads(place, value, path, line)
        if identity in self._inputs and (identity in self._written or self._is_symbolic(value)):
            return value
        if self.is_own(place.holder):
            if identity not in self._written:
                self.reached(value, path)
            self.pins_own(value)
            if identity not in self._written and not is_stand_in(value) and not is_value(value):
                self._own_reads.setdefault(identity, self._made(place, value, path, line))
            return value
        if identity in self._written or id(place.holder) in self._emptied:
            return value
        if is_stand_in(value):
            return value
        changed = id(place.holder) in self._mutated and place.kind != "type"
        if changed and identity not in self.reads:
            self._read_before(place, value, path, line)
            return value
        if self._begins_in(identity):
            return value  # which the step has put there, or a default dictionary
        if value is not MISSING:
            self.reached(value, path)
        if identity not in self.reads:
            self.reads[identity] = self._made(place, value, path, line)
            if isinstance(value, torch.Tensor):
                self.read(OutsidePlace("kind", value), path, line)
            elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
                self._reads_bytes(value, path, line)
        return value

    def _is_symbolic(self, value: Any) -> bool:
        """True if a value is a symbolic number, or a tuple of such."""
        if isinstance(value, tuple):
            return bool(value) and all(map(self._is_symbolic, value))
        return isinstance(value, SYMBOLIC)

    def _begins_in(self, identity: tuple[Any, ...]) -> bool:
        """True if the graph holds only while a place is empty."""
        return identity in self.reads and self.reads[identity].value is MISSING

    def _read_before(self, place: OutsidePlace, value: Any, path: str, line: SourceLine) -> None:
        """Records a dependence on the former contents of a container that the step has changed."""
        before = OutsidePlace(place.kind, self._mutated[id(place.holder)], place.key).now()
        if before is value:
            self.reached(value, path)
        self.reads[place.identity] = self._made(place, before, path, line)

    def contents(
        self,
        container: Any,
        path: str,
        line: SourceLine,
        nested: bool = True,
        seen: set[int] | None = None,
    ) -> None:
        """Records that the step reads everything in a container.

        Args:
            nested: of containers within it as well.
            seen: those that have been gone through, by id; one may be within several others.
        """
        seen = set() if seen is None else seen
        if not self.is_outside(container) or id(container) in seen:
            return
        seen.add(id(container))
        if is_bytes(container):
            self._reads_bytes(container, path, line)
            return
        items = self._items_of(container, path, line)
        if not nested:
            return
        for key, value in items:
            if is_read(value):
                inner = f"{path}[{key_text(key)}]"
                self.reached(value, inner)
                self.contents(value, inner, line, seen=seen)

    def _items_of(self, container: Any, path: str, line: SourceLine) -> list[tuple[Any, Any]]:
        """Records reads of a container's items; those of a large one as one read."""
        if isinstance(container, (dict, types.MappingProxyType)):
            self.read(OutsidePlace("keys", container), f"the keys of {path}", line)
            keys: Iterable[Any] | None = list(container)
        elif isinstance(container, (list, tuple, deque)):
            self.size(container, path, line)
            keys = range(len(container))
        else:
            keys = None
        if keys is not None and len(container) <= _SINGLY:
            return [(key, self.item(container, key, path, line)) for key in keys]
        if not isinstance(container, tuple):
            self._reads_whole(container, path, line)
        values = container.values() if isinstance(container, _TABLES) else container
        return list(zip(count() if keys is None else keys, values, strict=False))

    def _reads_whole(self, container: Any, path: str, line: SourceLine) -> None:
        if len(container) > _AT_MOST:
            self._refuse_large(f"{len(container):,} items", path)
        else:
            self.read(OutsidePlace("whole", container), path, line)

    def _reads_bytes(self, container: Any, path: str, line: SourceLine) -> None:
        self.reads_array(container)
        flags = getattr(container, "flags", None)
        if flags is not None and not flags.writeable:
            return
        if bytes_in(container) > PUT_BACK:
            self._refuse_large(f"{bytes_in(container) >> 20} MB", path)
        else:
            self.read(OutsidePlace("whole", container), path, line)

    def _refuse_large(self, size: str, path: str) -> NoReturn:
        """Refuses a container too large to compare in each call."""
        raise refusal(
            f"it reads all of {path}, {size} outside its arguments",
            "make it a tensor of the model (register_buffer), or what cannot change: a tuple,"
            " an array with flags.writeable = False; or read it outside the step",
        )

    def item(self, container: Any, key: Any, path: str, line: SourceLine) -> Any:
        """Records that the step reads one item of an outside container."""
        if isinstance(container, list) and isinstance(key, int) and key < 0:
            self.size(container, path, line)
            key += len(container)
        self.pin(key)
        return self.read(OutsidePlace("item", container, key), f"{path}[{key_text(key)}]", line)

    def size(self, container: Any, path: str, line: SourceLine) -> None:
        if not isinstance(container, (tuple, str, bytes)):
            self.read(OutsidePlace("size", container), f"len({path})", line)

    def iterator(self, iterator: Any, path: str, line: SourceLine) -> None:
        """Refuses the use of an outside iterator, whose values each call would not find again."""
        if self.is_outside(iterator):
            self.advanced = self.advanced or (path, line)
            self.refuse_advanced()  # before it is advanced: no trace is to take any

    def refuse_advanced(self) -> None:
        """Raises the refusal of an iterator again, if the step has caught it."""
        if self.advanced is not None:
            path, line = self.advanced
            raise HostWork.ITERATOR.refused(path, line)

    def _made(self, place: OutsidePlace, value: Any, path: str, line: SourceLine) -> OutsideRead:
        if self.stands_for and place.kind in ("keys", "whole") and isinstance(value, _SEVERAL):
            value = type(value)(map(self._original, value))
        return OutsideRead(self._outside(place), value, path, line)


def of_none(container: Any) -> None:
    """Stands for an iteration method that returns the object itself."""


def is_stand_in(value: Any) -> bool:
    """True if a value is a stand-in for a graph input, or a tuple of such."""
    if isinstance(value, tuple):
        return bool(value) and all(map(is_stand_in, value))
    return _compat.is_fake(value) or is_host_number(value)
