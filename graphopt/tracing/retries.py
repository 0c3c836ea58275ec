"""How a refused trace is tried again: the changes to a call under which it may succeed."""

from __future__ import annotations

from dataclasses import replace

from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.effects.decisions import OwnDecisionError
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs, Number, PlacedNumber
from graphopt.tracing.inputs.implicit import ImplicitInputs, MoreInputs
from graphopt.tracing.refusals.failures import definition_of, is_raised


def retried(call: Call, inputs: Inputs, error: MoreInputs | CaptureError) -> Call:
    """The call as it may be traced with success where it has been refused with `inputs`: with what
    it works on besides; with all decisions as a rank's own; with the other answer where a guessed
    one led to an exception; with more known of sizes that depend on values, where something asked
    about them; with libraries that find out that they are traced, where their decisions by value
    cannot be followed; or with its numbers as constants, since some code takes nothing else.

    Raises:
        CaptureError: `error`, where that has been tried.
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
    """What another trace has found.

    Raises:
        CaptureError: each finds something else.
    """
    if call.besides.rounds == _ROUNDS:
        paths = [each[0] for each in (*more.carried, *more.tensors, *more.objects)]
        raise CaptureError(
            f"each of {_ROUNDS} traces of it finds something else that it works on: {paths[:1]}",
            location=str(definition_of(call.fn)),
            hint="make what it works on once, outside the step",
        )
    return replace(more, rounds=1)


_ROUNDS = 100


def _alone(error: CaptureError) -> CaptureError:
    """An error without what it holds of the trace."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _was_guessed_wrong(inputs: Inputs, error: CaptureError) -> bool:
    """Whether the last answer was a guess after which the step raised an exception."""
    return inputs.guessed == len(inputs.answers) - 1 and is_raised(error)


def _may_be_told(call: Call, inputs: Inputs) -> bool:
    """Whether a library has taken decisions because it did not find out that it is traced."""
    decided = inputs.asked and bool(inputs.answers) and not call.decided
    return decided and not call.besides.as_traced


def _may_be_plain(number: Number) -> bool:
    """Whether a number need not be an input of the graph."""
    if isinstance(number, PlacedNumber):
        return not number.counted
    return isinstance(number, ArgumentNumber)
