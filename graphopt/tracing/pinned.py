"""Objects from outside that a step leaves somewhere: each call needs those very objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from graphopt.tracing.given import ContainerChange
from graphopt.tracing.given_objects import OpenedObjects
from graphopt.tracing.nests import parts
from graphopt.tracing.outside.record import Record


def nest_parts(value: Any) -> Iterator[Any]:
    """A value, and all that is in it where it is a nest."""
    return parts(value, lambda each: isinstance(each, (dict, list, tuple)))


def pin_changes(record: Record, changes: Iterable[ContainerChange]) -> None:
    """The step leaves objects in containers among its arguments."""
    for each in nest_parts([value for change in changes for _, value in change.items]):
        record.pin(each)


def pin_held(record: Record, objects: OpenedObjects, tables: Iterable[dict[str, Any]]) -> None:
    """The step leaves objects among its arguments in attributes of modules and optimizers.

    Args:
        objects: those that are taken apart.
        tables: the attributes.
    """
    for each in nest_parts([list(table.values()) for table in tables if objects]):
        if objects.holds(each):
            record.pin(each)
