"""Whether further calls of a step do what its first trace does, and what they read."""

from __future__ import annotations

from collections.abc import Callable

from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.effects.host_state import check_left
from graphopt.tracing.failures import definition_of
from graphopt.tracing.inputs.implicit import MoreInputs
from graphopt.tracing.optimizers.first_call import gives_alike
from graphopt.tracing.outside.record import Record
from graphopt.tracing.outside.steps import unchanged
from graphopt.tracing.reduction import UnagreedParameterError
from graphopt.tracing.results.comparison import first_difference
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
    """The trace of a step that leaves something on the host, what its next call reads outside the
    arguments, and whether its graph holds for that call, too.

    The next call is traced as the effects of this one leave the host. Where it does something else,
    as where a model finishes its construction in its first forward, it is captured for itself.

    Raises:
        CaptureError: each call would leave something that no later one repeats.
    """
    second = _next_call(raw, retrace)
    if second is not None and _repeats(raw, second):
        return raw, unchanged(second.outside), complete(raw)
    if not raw.effects:
        raise _differs(call, raw, second)
    check_left(raw.effects, raw.outside)
    return raw, raw.outside, False


def _differs(call: Call, first: RawTrace, second: RawTrace | None) -> CaptureError:
    """Why a step is refused that leaves nothing behind, and of which two traces differ."""
    difference = second and first_difference(first.graph_module, second.graph_module)
    if difference:
        return CaptureError(
            f"two traces of it differ ({difference.what}): it reads something that changes between"
            " calls, which would be baked in",
            location=str(difference.source or definition_of(call)),
            hint="pass what changes as an argument of the step (a tensor, if it changes every"
            " step), or keep it in a buffer of the model",
        )
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


def _repeats(first: RawTrace, second: RawTrace | None) -> bool:
    return (
        second is not None
        and first_difference(first.graph_module, second.graph_module) is None
        and gives_alike(first, second)
    )
