"""Changes that a step makes to lists and dictionaries among its arguments.

    batch["logits"] = model(batch["x"])    every call puts its own logits into its own batch

A trace gets containers of its own, made anew from what is in the real ones. They are compared with
what they were when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from graphopt.errors import CaptureError
from graphopt.tracing.effects.tuples import TupleTable, nests_in
from graphopt.tracing.inputs.argument_objects import AttributesOf, OpenedObjects
from graphopt.tracing.rollback.nests import Path, containers_in

_NO_ITEM = object()


@dataclass(frozen=True)
class ContainerChange:
    """The change that a step makes to one container.

    Attributes:
        removed: keys of a dictionary that are gone.
        items: new items of the dictionary.
    """

    path: Path
    removed: tuple[Any, ...]
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class InObject:
    """The first step of a path to a container inside an object among the arguments.

    Attributes:
        position: the position of the object among the leaves of the arguments.
    """

    position: int


class GivenContainers:
    """The containers among a trace's arguments, with their contents before the step.

    Args:
        objects: those that are taken apart, and not made anew.
        refused: the refusal of a change of a list, given the list.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        objects: OpenedObjects,
        refused: Callable[[Any], CaptureError],
    ) -> None:
        found, self._refused = containers_in(args, kwargs), refused
        self._before = [(path, container, container.copy()) for path, container in found]
        self._objects = objects
        for each in objects.tables:
            path = (InObject(each.root), *each.path)
            self._before.append((path, each.table, each.table.copy()))

    def paths(self) -> list[tuple[Any, Path]]:
        """The containers with their paths in the arguments."""
        return [(container, path) for path, container, _ in self._before]

    def places(self) -> dict[int, tuple[Any, Path]]:
        """The containers and opened objects by id, with their paths."""
        found = {id(container): (container, path) for path, container, _ in reversed(self._before)}
        inner = [*self._objects.found]
        for of in {id(field.table): field.table for field in self._objects.fields}.values():
            if isinstance(of.table, TupleTable):
                nests = nests_in(of.table.place.now())
                inner += [(each, of.root, (*of.path, *path)) for path, each in nests]
        paths = ((value, (InObject(root), *path)) for value, root, path in inner)
        return found | {id(value): (value, path) for value, path in paths}

    def changes(self) -> Iterator[ContainerChange]:
        """The changes of all containers since before the step.

        Raises:
            CaptureError: a list is.
        """
        for path, container, before in self._before:
            if isinstance(container, list):
                if len(container) != len(before) or not all(map(is_, container, before)):
                    raise self._refused(container)
                continue
            moved = set(_moved(list(before), list(container)))
            removed = tuple(key for key in before if key not in container or key in moved)
            items = tuple(
                (key, value)
                for key, value in container.items()
                if key in moved or before.get(key, _NO_ITEM) is not value
            )
            if removed or items:
                yield ContainerChange(path, removed, items)


def _moved(before: list[Any], now: list[Any]) -> Iterator[Any]:
    """The dictionary keys that a step has removed and inserted again, so that their order
    changed."""
    place = 0
    for key in filter(set(now).__contains__, before):
        if now[place] == key:
            place += 1
        else:
            yield key


def found_in(
    given: tuple[tuple[Any, ...], dict[str, Any]], leaves: Sequence[Any], path: Path
) -> Any:
    """The container or object at a path in a call's arguments before the call changes any, or None.

    Args:
        given: positional and keyword arguments of the call.
        leaves: what is in them.
    """
    container: Any = given
    for key in path:
        try:
            if isinstance(key, InObject):
                container = leaves[key.position]
            else:
                container = vars(container) if isinstance(key, AttributesOf) else container[key]
        except (LookupError, TypeError):
            return None
    return container


def make_change(container: Any, change: ContainerChange, values: list[Any]) -> None:
    """Applies the change that a step makes to a container.

    Args:
        values: the values of the items in this call.
    """
    for key in change.removed:
        container.pop(key, None)
    for (key, _), value in zip(change.items, values, strict=True):
        container[key] = value
