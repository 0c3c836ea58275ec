"""Observe one trace of a step, refuse a step that changes what it reads, and guard the objects from
outside that it leaves somewhere: each call needs those very objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.guards.outside import shown
from graphopt.ir.source import SourceLine
from graphopt.tracing.bytecode.attributes import read_method
from graphopt.tracing.bytecode.observe import Observer, observed
from graphopt.tracing.call import Call
from graphopt.tracing.effects.argument_changes import ContainerChange
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs, MoreInputs
from graphopt.tracing.outside.changed_containers import MUTABLE
from graphopt.tracing.outside.held import is_object
from graphopt.tracing.outside.places import OutsidePlace, OutsideRead, is_container
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.refusals.calls import SubstitutedCalls
from graphopt.tracing.refusals.failures import definition_of
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.results.signature import Constant, Recipe
from graphopt.tracing.rollback.nests import containers_in, parts

_HINT = (
    "keep what changes from step to step in a buffer of the model (register_buffer), or pass it as"
    " an argument; change other objects outside the step"
)


def record_for(call: Call, inputs: Iterable[OutsidePlace]) -> OutsideRecord:
    """Makes the empty record of a step, before any stand-ins are inserted.

    Args:
        inputs: places whose numbers the graph takes.
    """
    own: list[dict[str, Any]] = []
    for _, module in call.named_submodules():
        own += [vars(module), *_compat.own_tables(module)]
    own += [vars(optimizer) for optimizer in call.optimizer_objects()]
    told = {each.place.identity for each in call.besides.carried if each.counted}
    places = [*inputs, *(field.place for field in call.objects.fields)]
    record = OutsideRecord(own, {place.identity for place in places}, told)
    record.repeated = {id(each.table) for each in call.objects.tables}
    return record


@contextmanager
def observed_step(
    call: Call, record: OutsideRecord, substitute: SubstitutedCalls
) -> Iterator[None]:
    """While active, outside reads of the step go into `record`.

    Args:
        substitute: says what the step's instructions call in place of a function.

    Raises:
        CaptureError: the step counts outside its arguments, and reads the count.
    """
    line = SourceLine(__file__, 0, "")
    modules = [module for _, module in call.named_submodules()]
    for owner in {type(module) for module in modules}:
        for name in ("forward", "__call__", "_call_impl"):
            read_method(record, owner, name, line)
    for optimizer in call.optimizer_objects():
        for name in ("step", "zero_grad"):
            read_method(record, type(optimizer), name, line)
    for name, module in call.named_submodules():
        record.reached(module, name or "the model")
    for name, leaf in zip(call.names, call.leaves, strict=True):
        record.reached(leaf, name)
    defined = definition_of(call.fn) or line
    opened = record.given.opened = call.objects.roots
    for position in (*opened, *(p for p in call.constants if p not in opened)):
        leaf, name = call.leaves[position], call.names[position]
        if position in opened or is_object(leaf):
            record.given[position] = leaf
            place = OutsidePlace("item", record.given, position)
            record.read(place, name if position in opened else f"argument {name}", defined)
    record.reached(call.fn, getattr(call.fn, "__name__", "the step"))
    record.reached(getattr(call.fn, "__self__", None), "self")
    observer = Observer(record, set(map(id, modules)), substitute)
    with observer.refusing(), observed(observer):
        yield
    record.finish()
    if record.unrepeated.at_once:
        refuse_unrepeated(record)
    if record.compared is not None:
        raise CaptureError(
            "it asks whether a tensor of the model is one that it holds elsewhere (by `is`),"
            " which cannot be answered while another one stands for it",
            location=record.compared,
            hint="compare names (model.named_parameters()) or id()",
        )
    record.refuse_advanced()


def gives(record: OutsideRecord, returned: Iterable[Any]) -> None:
    """Requires outside objects that the step returns to be the same in each call.

    Args:
        returned: what it returns, and all that is in it but for what is in these.
    """
    for value in returned:
        if id(value) not in record.of_call:
            record.pin(value)


def refuse_changed_reads(record: OutsideRecord) -> None:
    """Refuses a step that changes the outside state it reads.

    Raises:
        CaptureError: naming the line that changes it, or the one that reads.
        MoreInputs: it changes a bool, a text or None, which each call may do.
    """
    if record.changed is not None:
        read, now = record.changed
        flags = _is_flag(read.value) and _is_flag(now) and read.place.is_written
        if flags and not record.is_told(read.place):
            place = CarriedPlace(read.path, read.place, counted=True)
            raise MoreInputs(ImplicitInputs(carried=[place]))
        _refuse(record, read, now)
    refuse_unrepeated(record)


def refuse_unrepeated(record: OutsideRecord) -> None:
    """Raises if a step makes changes that later calls would not repeat."""
    if record.unrepeated.first is not None:
        raise not_repeated(*record.unrepeated.first)


def not_repeated(what: str, line: SourceLine | None) -> CaptureError:
    """Builds the error for a change that later calls would not repeat."""
    return HostWork.CHANGE.error(f"{what} outside its arguments", line)


def _is_flag(value: Any) -> bool:
    return value is None or type(value) in (bool, str)


def _refuse(record: OutsideRecord, read: OutsideRead, now: Any) -> None:
    if type(read.place.holder) in MUTABLE or read.place.kind == "whole":
        changed = record.unrepeated.written_at(read.place.holder)
        raise not_repeated(*(changed or (read.path, read.line)))
    before = shown(read.value)  # what it is now already, where it is changed before it is read
    became = "" if before == shown(now) else f" ({before} became {shown(now)})"
    raise CaptureError(
        f"it reads {read.path} outside its arguments and changes it{became}, which would happen at"
        " capture only",
        location=record.changed_at or read.line,
        hint=_HINT,
    )


def refuse_found_twice(
    record: OutsideRecord,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    changes: Iterable[ContainerChange],
) -> None:
    """Refuses a step that changes an argument container which it also finds outside, or as another
    argument: a trace has a separate copy for each.

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
    """Requires the outside containers that the step stores in module attributes to be the same in
    each call."""
    values = [recipe.value for recipe in recipes if isinstance(recipe, Constant)]
    for each in parts(values, lambda each: isinstance(each, (dict, list, tuple))):
        if is_container(each) and record.is_outside(each):
            record.pin(each)
