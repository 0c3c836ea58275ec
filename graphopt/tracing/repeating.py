"""Whether further calls of a step do what its first trace does, and what they read."""

from __future__ import annotations

from collections.abc import Callable

from graphopt.errors import CaptureError
from graphopt.tracing.besides import MoreInputs
from graphopt.tracing.call import Call
from graphopt.tracing.compare import GraphDifference, first_difference
from graphopt.tracing.failures import definition_of
from graphopt.tracing.first_call import gives_alike
from graphopt.tracing.leftovers import check_left
from graphopt.tracing.outside.record import Record
from graphopt.tracing.outside.steps import unchanged
from graphopt.tracing.reduction import UnagreedParameterError
from graphopt.tracing.trace import RawTrace


def leaves_something(raw: RawTrace) -> bool:
    """Whether a step leaves something on the host, so that its next call may do something else: a
    cache that it fills, a flag, a counter. All else that it goes by is guarded or refused."""
    outside = raw.outside
    changed = outside.changed is not None or outside.unrepeated.first is not None
    return changed or bool(raw.effects)


def repeated(
    raw: RawTrace, retrace: Callable[[], RawTrace], call: Call
) -> tuple[RawTrace, Record, bool]:
    """A trace that the next one repeats, what that one has read outside the arguments, and whether
    further calls do the same.

    The next one is traced as the effects of this one leave the host.
    """
    second = _next_call(raw, retrace)
    if second is not None and _repeats(raw, second):
        return raw, unchanged(second.outside), complete(raw)
    if raw.effects and _leaves_else(raw, second):
        check_left(raw.effects, raw.outside)
        return raw, raw.outside, False
    third = retrace()
    if _repeats(third, second):
        return third, _read_next(third, retrace), complete(third)
    if second is not None:
        unchanged(second.outside)
    if raw.effects and (second is None or not second.effects):
        difference = _difference_once(raw, second, third, retrace)
        if difference is None:
            check_left(third.effects, third.outside)
            return third, third.outside, False
    else:
        assert second is not None
        unchanged(third.outside)
        difference = first_difference(second.graph_module, third.graph_module)
        if difference is None:
            raise _leaves_another(call)
    raise CaptureError(
        f"two traces of it differ ({difference.what}): it reads something that changes between"
        " calls, which would be baked in",
        location=str(difference.source or definition_of(call)),
        hint="pass what changes as an argument of the step (a tensor, if it changes every step),"
        " or keep it in a buffer of the model",
    )


def _leaves_another(call: Call) -> CaptureError:
    return CaptureError(
        "it leaves a number or text outside its arguments that is another one in two traces of it,"
        " such as the time, which would be baked in",
        location=str(definition_of(call)),
        hint="let a function do it that is called in every step: graphopt.callback(function), or do"
        " it outside the step",
    )


def complete(raw: RawTrace) -> bool:
    """Whether the effects are all that the next call finds changed: not so where the step has made
    a tensor attribute besides, which is there after it has run."""
    return not raw.effects or not raw.signature.makes_attributes


def _next_call(raw: RawTrace, retrace: Callable[[], RawTrace]) -> RawTrace | None:
    """The step traced as its effects leave everything; None where that call is refused, which is
    said when it comes, or has other inputs."""
    if not raw.effects:
        return retrace()
    with raw.effects.applied():
        try:
            return retrace()
        except (CaptureError, UnagreedParameterError):
            return None
        except MoreInputs as error:
            if works_on_what_is_left(raw, error):
                return None
            raise


def works_on_what_is_left(raw: RawTrace, error: MoreInputs) -> bool:
    """Whether the next call counts in a list or an object that this one makes, and each trace of it
    another one: there is one to count in when this call has run."""
    holders = [each.place.holder for each in error.besides.carried]
    return any(not raw.outside.is_outside(holder) for holder in holders)


def _read_next(raw: RawTrace, retrace: Callable[[], RawTrace]) -> Record:
    """What the call after `raw` reads outside the arguments."""
    if not raw.effects:
        return unchanged(raw.outside)
    following = _next_call(raw, retrace)
    # Where that call is refused, no guard may hold what its effects change.
    if following is None:
        raw.outside.unrepeated.first = None
        return unchanged(raw.outside)
    return unchanged(following.outside)


def _repeats(first: RawTrace, second: RawTrace | None) -> bool:
    return (
        second is not None
        and first_difference(first.graph_module, second.graph_module) is None
        and gives_alike(first, second)
    )


def _leaves_else(first: RawTrace, second: RawTrace | None) -> bool:
    """Whether the second call differs from the first one only in what it returns or leaves."""
    return (
        second is not None
        and not gives_alike(first, second)
        and first_difference(first.graph_module, second.graph_module) is None
    )


def _difference_once(
    first: RawTrace, after: RawTrace | None, again: RawTrace, retrace: Callable[[], RawTrace]
) -> GraphDifference | None:
    """Of a step whose first call alone does something else (a model that finishes its construction
    in its first forward): what differs between two first calls, or between two later ones."""
    difference = first_difference(first.graph_module, again.graph_module)
    if difference is not None:
        difference = first_difference(again.graph_module, retrace().graph_module)
    if difference is not None or after is None:
        return difference
    with first.effects.applied():
        return first_difference(after.graph_module, retrace().graph_module)
