"""How a traced step changes lists, queues and sets outside its arguments: each call does the same.

    history.append(loss.item())      every call appends its own number
    seen.add("warm"); rows.clear()   and changes what there is then

Taken out after the trace, where nothing else has been done with a container and none has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from graphopt.errors import CaptureError
from graphopt.host.changes import ChangeByMethod, is_changed_to, put_back
from graphopt.ir.source import SourceLine
from graphopt.tracing.later_values import holds_unknown
from graphopt.tracing.outside.changed_containers import ChangedContainer
from graphopt.tracing.outside.places import FollowedPlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.outside.unrepeated import users
from graphopt.tracing.placed import found_again, is_at
from graphopt.tracing.signature import ChangedResult, Constant, PlacedResult
from graphopt.tracing.told import MadeAnew, told


def take_changed(
    record: Record,
    placed: Iterable[PlacedResult],
    replaced: Mapping[int, FollowedPlace],
    puts_back: Callable[[Any], bool],
    made: MadeAnew,
) -> list[ChangedResult]:
    """Take out what a traced step has put into lists, queues and sets outside, where these are
    tensors, numbers, texts, nests of them, or objects from outside: as `take_placed` does.

    Args:
        placed: what it has left in places, in which there is what was before.
        replaced: containers in whose place it leaves others; see `exchanged_containers`.
        puts_back: whether an object is as it was when the trace is over. What other threads may be
            changing is not.
        made: what each call makes anew, by id; see `told`.
    """
    found = []
    for container, line in record.rewritten.values():
        if not puts_back(container):
            record.unrepeated.refuse(record.path(container, type(container).__name__), line)
    exchanged = {id(each.place.now()): FollowedPlace(each.place) for each in placed}
    exchanged.update(replaced)
    for each in record.take_changed(replaced.keys()):
        if not puts_back(each.container):
            if is_changed_to(each.container, each.before, each.changes):
                put_back(each.container, each.before)
            record.unrepeated.refuse(*_written(record, each))
            continue
        items = tuple((change, told(record, value, made)) for change, value in each.changes)
        constant = all(isinstance(value, Constant) for _, value in items)
        if isinstance(each.container, set) and not constant:
            continue  # where it stands in a set goes by what stands for it
        if any(value is None for _, value in items):
            record.refused = record.refused or _puts_new(record, each, items)
            continue
        if not is_changed_to(each.container, each.before, each.changes):
            if not is_changed_to(each.container, each.before, ()):
                record.refused = record.refused or _changes_otherwise(record, each)
            else:
                record.holds_contents(each.container, each.line)
            continue
        put_back(each.container, each.before)
        within = exchanged.get(id(each.container))
        if within is None or not is_at(record, each.container, within.place):
            within = found_again(record, each.container)
        if within is None:
            record.pin(each.container)
        found.append(ChangedResult(each.container, items, within, str(each.line)))
    for each in record.not_followed:
        if each.otherwise and not is_changed_to(each.container, each.before, ()):
            record.unrepeated.add(*_written(record, each))
        record.refused = record.refused or _reads_besides(record, each)
    followed = {
        identity: exchanged[identity]
        for identity, container in record.laters.lists.items()
        if identity in exchanged and is_at(record, container, exchanged[identity].place)
    }
    followed |= {id(each.container): each.within for each in found if each.within is not None}
    record.laters.settle(followed)
    return found


def _written(record: Record, changed: ChangedContainer) -> tuple[str, SourceLine]:
    """What a step has changed as a message says it, and the line."""
    container = changed.container
    known = record.unrepeated.written_at(container)
    return known or (type(container).__name__, changed.line)


def _puts_new(
    record: Record, changed: ChangedContainer, made: Sequence[tuple[ChangeByMethod, Any]]
) -> CaptureError:
    pairs = zip(changed.changes, made, strict=True)
    kinds = {type(value).__name__ for (_, value), (_, known) in pairs if known is None}
    path = record.path(changed.container, type(changed.container).__name__)
    return CaptureError(
        f"it puts a {' and a '.join(sorted(kinds))} that it makes into {path}, which would happen"
        " at capture only",
        location=str(changed.line),
        hint="put a tuple, dictionary or data class of its values there, or let a function do it"
        " that is called in every step: graphopt.callback(history.append, loss)",
    )


def _changes_otherwise(record: Record, changed: ChangedContainer) -> CaptureError:
    path = record.path(changed.container, type(changed.container).__name__)
    tensors = [each for each in changed.before if isinstance(each, torch.Tensor)]
    if any(len(record.places_of(each)) > 1 for each in tensors):
        return CaptureError(
            f"it moves a tensor in {path} that it finds in another place as well, where a later"
            " call may find two",
            location=str(changed.line),
            hint="put a copy of it into one of the places: tensor.clone()",
        )
    return CaptureError(
        f"it changes {path} in a way that is not followed, which would happen at capture only",
        location=str(changed.line),
        hint="append, insert, add or delete single items, or do it outside the step",
    )


def _reads_besides(record: Record, changed: ChangedContainer) -> CaptureError | None:
    """Why each call cannot change a container for itself that the step also reads; None where what
    it puts there are constants, and no call computes of what is there then."""
    container, location = changed.container, str(changed.line)
    path = record.path(container, "a list")
    if record.is_asked(container):
        return CaptureError(
            f"it changes {path}, whose length or sum is an input of the graph, in a way that is not"
            " followed",
            location=location,
            hint="append and delete single items, or change it outside the step",
        )
    computed = id(container) in record.laters.lists
    if not computed and not any(holds_unknown(value) for _, value in changed.changes):
        return None
    read = record.read_of(container)
    does = "puts what the graph gives into" if not computed else "changes and computes of"
    return CaptureError(
        f"it {does} {path}, and reads {read.path} in a way that is not followed"
        f" ({users(read.line)})",
        location=location,
        hint="read it in a function that is called in every step, graphopt.callback(function), or"
        " outside the step; what is followed of a list is its length, and sums, items and what"
        " numpy gives of its numbers",
    )
