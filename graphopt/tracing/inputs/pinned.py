"""Objects from outside that a step leaves somewhere: each call needs those very objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from graphopt.errors import CaptureError
from graphopt.tracing.effects.argument_changes import ContainerChange
from graphopt.tracing.interception.nests import containers_in, parts
from graphopt.tracing.outside.places import is_container
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.results.signature import Constant, Recipe


def nest_parts(value: Any) -> Iterator[Any]:
    """A value, and all that is in it where it is a nest."""
    return parts(value, lambda each: isinstance(each, (dict, list, tuple)))


def refuse_found_twice(
    record: OutsideRecord,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    changes: Iterable[ContainerChange],
) -> None:
    """Refuse a step that changes a container among its arguments which it also finds outside, or
    as another argument: the trace has another one in the place of each argument.

    Args:
        given: positional and keyword arguments of the call.

    Raises:
        CaptureError: it does.
    """
    paths = {change.path for change in changes}
    found = list(containers_in(*given))
    times = Counter(id(container) for _, container in found)
    changed = {id(container) for path, container in found if path in paths}
    for _, container in found:
        outside = record.path_to(container)
        twice = outside is not None or times[id(container)] > 1
        if twice and (id(container) in changed or record.is_changed(container)):
            where = "that stands there twice" if outside is None else f"that it finds at {outside}"
            raise CaptureError(
                f"it changes a {type(container).__name__} among its arguments {where}",
                hint="let the step get to it in one way alone",
            )


def pin_left(record: OutsideRecord, recipes: Iterable[Recipe]) -> None:
    """The step leaves constants in attributes of modules: each call leaves the containers that were
    there before, and so has to find them where this one has."""
    values = [recipe.value for recipe in recipes if isinstance(recipe, Constant)]
    for each in nest_parts(values):
        if is_container(each) and record.is_outside(each):
            record.pin(each)
