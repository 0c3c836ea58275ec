"""Refuses a step that changes lists, queues and sets outside its arguments.

history.append(loss.item())      would happen at capture only: refused, with the line
stack.append(x); stack.pop()     leaves the very items that were there before: no change
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphopt.tracing.outside.record import OutsideRecord


def refuse_changed_containers(record: OutsideRecord, puts_back: Callable[[Any], bool]) -> None:
    """Records a refusal for each outside container that the step leaves with other items.

    Args:
        puts_back: whether an object is as it was when the trace is over. One that other threads may
            be changing is not.
    """
    for container, line in record.rewritten.values():
        if not puts_back(container):
            record.unrepeated.refuse(record.path(container, type(container).__name__), line)
    for each in record.take_changed():
        known = record.unrepeated.written_at(each.container)
        path, line = known or (type(each.container).__name__, each.line)
        if each.is_as_before:
            record.holds_contents(each.container, each.line)  # of another it may leave less
        elif puts_back(each.container):
            record.unrepeated.add(path, line)
        else:
            each.put_back()
            record.unrepeated.refuse(path, line)
