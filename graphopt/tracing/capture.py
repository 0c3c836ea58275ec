"""`graphopt.capture`: traces one call of a step to a graph in the captured dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.settings import dispatch_keys_kept
from graphopt._compat.threads import taking_turns
from graphopt.errors import CaptureError
from graphopt.parallel import OverRanks, Parallel, resolve
from graphopt.parallel.markers import Group
from graphopt.parallel.parallelize import parallelize
from graphopt.ranks.buffer_groups import group_of_buffers
from graphopt.runtime.memory import collector_paused
from graphopt.tracing.call import Call, check_supported, is_array
from graphopt.tracing.captured_dialect import finish
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.collecting import collect
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import MoreInputs
from graphopt.tracing.inputs.remembered import idle_in, without
from graphopt.tracing.optimizers.beforehand import state_beforehand, with_state_used
from graphopt.tracing.optimizers.new_state import NO_STATE, NewState
from graphopt.tracing.outside.existing import births_are_noted, births_noted
from graphopt.tracing.ranks.reduction import AgreedOrder, MarkedCommunication
from graphopt.tracing.refusals.failures import definition_of, explained
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.kept_casts import refuse_kept_casts
from graphopt.tracing.retries import retried
from graphopt.tracing.rollback.reachable import trained_objects
from graphopt.tracing.trace import RawTrace, trace


def capture(
    fn: Callable[..., Any],
    *args: Any,
    parallel: Parallel | None = None,
    warm: bool = True,
    **kwargs: Any,
) -> CapturedStep:
    """Capture one call `fn(*args, **kwargs)` of a training step without running it.

    Args:
        fn: the step: unchanged PyTorch, with modules and optimizers among its arguments.
        parallel: see `graphopt.compile`. Ranks do not talk to each other here: a parameter that
            this rank does not use is not averaged.
        warm: where an optimizer of torch's has no state yet, capture the step as all later calls
            run it, as `graphopt.compile` does: with state among its inputs. False: as the first
            call, which makes that state. With other optimizers it is always that one.

    Returns:
        The captured step. Model, optimizer, gradients and generators are as before.

    Raises:
        CaptureError: naming the user's line and what to write instead.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> gm = captured.graph_module
    >>> [node.name for node in gm.graph.nodes]
    ['x', 'relu', 'output']
    """
    communication = communication_for(resolve(parallel))
    captured = capture_call(Call(fn, args, kwargs), communication, lasts=warm)
    parallelize(captured.graph_module, captured.parallel)
    return captured


def capture_call(
    call: Call, communication: MarkedCommunication | None = None, *, lasts: bool = False
) -> CapturedStep:
    """`capture`, of arguments already taken apart, with the markers that `parallelize` expands.

    Args:
        lasts: state that optimizers make in their first step is made before it is traced.
    """
    alone = _compat.rank_among_several() is None  # else a rank may wait for what another one does
    with taking_turns() if alone else nullcontext(), capturing():
        call = call.with_whole_objects()
        while True:
            call, raw, made = trace_from_state(call, communication, lasts=lasts)
            try:
                with made.present():
                    return finish(raw, made, communication)
            except (MoreInputs, CaptureError) as error:
                call = retried(call, raw.inputs, error)


@contextmanager
def capturing() -> Iterator[None]:
    """What is so while a step is captured; within a capture, nothing more."""
    if births_are_noted():
        yield
        return
    with (
        dispatch_keys_kept(),
        _compat.unwatched(),
        _compat.without_fake_mode(),
        collector_paused(),
        births_noted(),
    ):
        yield


def trace_from_state(
    call: Call, communication: MarkedCommunication | None, *, lasts: bool
) -> tuple[Call, RawTrace, NewState]:
    """Traces a call from the state that its optimizers will create in it, if that is known
    beforehand.

    Args:
        lasts: see `capture_call`.
    """
    traced, raw, made = first_trace(call, communication, lasts=lasts)
    found = with_state_used(traced, made, raw) if made else (raw, made)
    if found is not None and not (made and raw.signature.states):
        return traced, *found
    return first_trace(call, communication, lasts=False)


def first_trace(
    call: Call, communication: MarkedCommunication | None, *, lasts: bool
) -> tuple[Call, RawTrace, NewState]:
    """Traces a call with all implicit inputs found; returns trace, call, and the optimizer state
    created for it.

    Args:
        lasts: see `capture_call`.

    Raises:
        CaptureError: the step cannot be captured.
    """
    refuse_kept_casts()
    optimizers: list[Optimizer] = []
    made = NO_STATE
    while True:
        if lasts and optimizers != call.optimizer_objects():
            optimizers, made = call.optimizer_objects(), NO_STATE  # no two states at once
            made = state_beforehand(optimizers)
        try:
            with made.present():
                found = _attempt(call, communication)
        except CaptureError as error:
            if not made or not isinstance(error.__cause__, KeyError):
                raise
            lasts, made = False, NO_STATE  # the step sets what its optimizer makes: `amsgrad`
            continue
        if not isinstance(found, Call):
            return call, found, made
        call = found


def _attempt(call: Call, communication: MarkedCommunication | None) -> RawTrace | Call:
    """Traces a call, or returns the changed call to trace instead.

    Raises:
        CaptureError: the step cannot be captured.
    """
    alone = communication is None
    try:
        inputs = prepare(call)
    except CaptureError:  # of what the step may leave alone
        if not call.remembered:
            raise
        return without(call, call.remembered)
    try:
        raw = trace(call, inputs, communication)
    except (MoreInputs, CaptureError) as error:
        left_alone = error.idle if isinstance(error, MoreInputs) and alone else ()
        return retried(without(call, left_alone), inputs, error)
    left_alone = idle_in(raw.graph_module.graph, call, inputs, raw.signature.stepped)
    if left_alone and alone:  # others may use it in a branch of their own
        return without(call, left_alone)
    uses_none = not inputs.module_tensors and not call.modules
    if uses_none and not alone and not trained_objects(call.fn, call.leaves):
        raise CaptureError(
            "there is no torch.nn.Module among its arguments, and it reaches none",
            location=definition_of(call.fn),
            hint="pass the model and the optimizer to the step: step(model, optimizer, batch)",
        )
    return raw


def prepare(call: Call) -> Inputs:
    """Checks the arguments and finds every input. Touches nothing.

    Raises:
        CaptureError: the arguments hold what cannot be captured exactly.
    """
    with explained(call.fn):
        check_supported(call)
        for position in call.constants:
            if is_array(call.leaves[position]):
                what = f"argument {call.names[position]}"
                raise HostWork.ARRAY.refused(what, definition_of(call.fn))
        return collect(call)


def communication_for(
    parallel: Parallel, agreed: AgreedOrder | None = None, *, accumulated: bool = True
) -> MarkedCommunication | None:
    """The communication that a trace marks for a kind of parallelism, or None."""
    if not isinstance(parallel, OverRanks):
        return None
    group = parallel.everyone
    named = Group(group.group_name, group.size())
    buffers = group_of_buffers(group)
    return MarkedCommunication(parallel, named, buffers, agreed, accumulated)
