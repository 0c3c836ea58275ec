"""Retries of a refused trace: the changes to a call under which it may succeed."""

from __future__ import annotations

from dataclasses import replace

from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.effects.decisions import OwnDecisionError
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs, Number, PlacedNumber
from graphopt.tracing.inputs.implicit import ImplicitInputs, MoreInputs
from graphopt.tracing.refusals.failures import definition_of, is_raised


def retried(call: Call, inputs: Inputs, error: MoreInputs | CaptureError) -> Call:
    """The changed call under which a refused trace may succeed.

    It has further implicit inputs; all decisions as a rank's own; the other outcome of a guess that
    led to an exception; more known of data-dependent sizes; libraries that notice the trace, since
    their decisions cannot be followed; or numbers as constants.

    Raises:
        CaptureError: `error`, if all of that has been tried.
    """
    if isinstance(error, CaptureError) and error.final:
        raise error
    if isinstance(error, OwnDecisionError) and not call.decides_alone:
        return call.deciding_alone()
    if isinstance(error, CaptureError) and _was_guessed_wrong(inputs, error):
        return call.with_answers((*inputs.answers[:-1], not inputs.answers[-1]))
    if isinstance(error, MoreInputs) and any(
        call.objects.contains(each.place.holder) for each in error.besides.carried
    ):
        error = CaptureError("it counts in an object among its arguments")
    asked = inputs.meets_sizes and error.__cause__ is not None
    knowing = call.knowing_sizes() if asked and isinstance(error, CaptureError) else None
    if knowing is not None:
        return knowing
    if isinstance(error, MoreInputs):
        more = _once_more(call, error.besides)
    elif _may_be_told(call, inputs):
        more = ImplicitInputs(as_traced=error.reason)
    elif call.objects:
        more = ImplicitInputs(whole_objects=True, unfollowed=_alone(error))
    elif not call.besides.plain and any(map(_may_be_plain, inputs.hyperparameters)):
        more = ImplicitInputs(plain=True)
    else:
        raise call.besides.unfollowed or error
    extended = call.using(call.besides.joined(more))
    assert extended is not None, "what a trace has just used is alive"
    return extended


def _once_more(call: Call, more: ImplicitInputs) -> ImplicitInputs:
    """Adds the inputs that another trace has found.

    Raises:
        CaptureError: each finds something else.
    """
    if call.besides.rounds == _ROUNDS:
        paths = [each[0] for each in (*more.carried, *more.tensors, *more.objects)]
        raise CaptureError(
            f"each of {_ROUNDS} traces of it finds something else that it works on: {paths[:1]}",
            location=definition_of(call.fn),
            hint="make what it works on once, outside the step",
        )
    return replace(more, rounds=1)


_ROUNDS = 100


def _alone(error: CaptureError) -> CaptureError:
    """An error without its references to the trace."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _was_guessed_wrong(inputs: Inputs, error: CaptureError) -> bool:
    """True if the step raised an exception after the last outcome, which was guessed."""
    return inputs.guessed == len(inputs.answers) - 1 and is_raised(error)


def _may_be_told(call: Call, inputs: Inputs) -> bool:
    """True if a library made decisions because it did not notice the trace."""
    decided = inputs.asked and bool(inputs.answers) and not call.decided
    return decided and not call.besides.as_traced


def _may_be_plain(number: Number) -> bool:
    """True if a number may be a constant instead of an input of the graph."""
    if isinstance(number, PlacedNumber):
        return not number.counted
    return isinstance(number, ArgumentNumber)
