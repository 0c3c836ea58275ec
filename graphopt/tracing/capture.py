"""`graphopt.capture`: one step, once, as a graph in the captured dialect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt._compat.settings import dispatch_keys_kept
from graphopt._compat.threads import taking_turns
from graphopt.errors import CaptureError
from graphopt.guards.outside import OutsideGuard
from graphopt.ir.placement import Placement, set_placement
from graphopt.parallel import Manual, OverRanks, Parallel, resolve
from graphopt.parallel.markers import Group
from graphopt.parallel.parallelize import parallelize
from graphopt.ranks.buffer_groups import group_of_buffers
from graphopt.ranks.independent_ranks import groups_apart
from graphopt.runtime.collector import collector_paused
from graphopt.tracing.call import Call, check_supported, is_array
from graphopt.tracing.casts import refuse_kept_casts
from graphopt.tracing.collecting import collect
from graphopt.tracing.decisions import OwnDecisionError, another_on_each_rank
from graphopt.tracing.effects.host_state import refuse_left
from graphopt.tracing.effects.reachable import trained_objects
from graphopt.tracing.failures import definition_of, explained, is_raised
from graphopt.tracing.functional.functionalization import functionalize, name_placeholders
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs, InputSpec, Number, PlacedNumber
from graphopt.tracing.inputs.found_places import FoundPlace, found_places
from graphopt.tracing.inputs.implicit import ImplicitInputs, MoreInputs
from graphopt.tracing.inputs.notes import (
    forget_unwritten,
    held_names,
    note_dead_gradients,
    note_held,
    note_returned,
    note_unread_numbers,
    refuse_shared_updates,
)
from graphopt.tracing.inputs.remembered import idle_in, without
from graphopt.tracing.optimizers.beforehand import state_beforehand, with_state_used
from graphopt.tracing.optimizers.new_state import NO_STATE, NewState
from graphopt.tracing.outside.existing import births_noted
from graphopt.tracing.ranks.uniformity import first_own, own_inputs
from graphopt.tracing.reduction import AgreedOrder, MarkedCommunication
from graphopt.tracing.refusals import HostWork
from graphopt.tracing.results.signature import Signature
from graphopt.tracing.shards import placements, shard_made
from graphopt.tracing.trace import RawTrace, trace

logger = logging.getLogger("graphopt")


@dataclass
class CapturedStep:
    """A training step as a graph.

    Attributes:
        graph_module: the graph in the captured dialect (docs/ir.md). Called with the live tensors
            in the order of `inputs`, it returns ``(user results, state updates, carried values)``.
        inputs: one `InputSpec` per placeholder.
        signature: how results become the return value, gradients and new optimizer state.
        live: where the values of `inputs` are found.
        outside: holds what the step read outside its arguments.
        besides: modules, optimizers and tensors that it works on besides its arguments.
        state: optimizer state among the inputs, to be put into the optimizers when the graph has
            run for the first time; None where there is none.
        parallel: the kind of parallelism that expands the markers of the graph.
        found: places outside that hold what may be another one in the next call.

    >>> import graphopt, torch
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> [(entry.kind, entry.fqn) for entry in captured.inputs]
    [('user_input', 'x')]
    >>> captured
    CapturedStep(3 nodes, 1 inputs)
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    signature: Signature
    live: Inputs
    outside: OutsideGuard
    besides: ImplicitInputs
    state: NewState | None = None
    parallel: Parallel = field(default_factory=Manual)
    found: Sequence[FoundPlace] = ()

    def __repr__(self) -> str:
        return (
            f"CapturedStep({len(self.graph_module.graph.nodes)} nodes, {len(self.inputs)} inputs)"
        )

    @cached_property
    def apart(self) -> frozenset[str]:
        """The groups that it communicates in, once its markers are expanded, in which others are
        than the ranks that run it alike."""
        return groups_apart(self.graph_module.graph, self.parallel)

    def state_present(self) -> AbstractContextManager[None]:
        """While active, the optimizers have all state that is among the inputs."""
        return nullcontext() if self.state is None else self.state.present()


def finish(
    call: Call,
    communication: MarkedCommunication | None,
    inputs: Inputs,
    raw: RawTrace,
    made: NewState = NO_STATE,
    *,
    held: Set[str] = frozenset(),
) -> CapturedStep:
    """Make the captured dialect of a trace.

    Args:
        made: optimizer state that has been made for the trace, and is there.
        held: names of what any rank holds in a way in which its use is not seen.

    Raises:
        CaptureError: the step leaves something on the host.
    """
    refuse_left(raw.outside)
    kinds = list(inputs.kinds_and_names(call))
    if call.besides.as_traced:
        _warn_of_rounding(call)
    with explained(call):
        functional = functionalize(raw)
    forget_unwritten(functional.graph_module, inputs, raw.signature)
    refuse_shared_updates(call, inputs, functional.updated)
    if communication is not None:
        own = own_inputs(inputs, call, broadcast=communication.parallel.broadcast)
        graph, group = functional.graph_module.graph, communication.group
        assumed = first_own(graph, inputs, own, raw.signature, group)
        if assumed is not None:
            raise another_on_each_rank(assumed.line)
    names = name_placeholders(functional.graph_module.graph, kinds)
    functional.graph_module.recompile()
    parallel = Manual() if communication is None else communication.parallel
    placed = placements(inputs, call, parallel)
    specs = tuple(
        InputSpec(kind, fqn, name, placed.get(index, Placement.FULL))
        for index, ((kind, fqn), name) in enumerate(zip(kinds, names, strict=True))
    )
    for node, spec in zip(functional.graph_module.graph.nodes, specs, strict=False):
        set_placement(node, spec.placement)
    note_returned(functional.graph_module, inputs, raw.signature)
    note_dead_gradients(functional.graph_module, specs, inputs, raw.signature)
    note_unread_numbers(functional.graph_module, inputs)
    inputs.rebound = list(raw.signature.rebound)
    note_held(functional.graph_module, inputs, held_names(inputs, raw), held)
    with call.besides.present():
        guard = OutsideGuard(raw.outside, _changed_objects(raw, inputs, call.besides))
    made = NewState(shard_made(made.entries, parallel), [*made.attributes, *call.besides.made])
    return CapturedStep(
        functional.graph_module,
        specs,
        raw.signature,
        inputs,
        guard,
        replace(call.besides, rounds=0),
        made or None,
        parallel,
        tuple(found_places(raw.outside, call)),
    )


def _changed_objects(raw: RawTrace, inputs: Inputs, besides: ImplicitInputs) -> list[Any]:
    """The objects outside of which a graph takes something that it changes: each call needs these
    very objects."""
    placed = [each.place for each in raw.signature.placed]
    lists = tuple(place.holder for place in placed if type(place.holder) is list)
    inputs.hyperparameters = [
        replace(each, apart=lists) if isinstance(each, PlacedNumber) else each
        for each in inputs.hyperparameters
    ]
    places = [*placed, *(each.place for each in besides.carried)]
    places += [each.place for each in inputs.hyperparameters if isinstance(each, PlacedNumber)]
    for place in places:
        raw.outside.need(place.holder)
        raw.outside.need(raw.outside.owner(place.holder))
    return [place.holder for place in places]


def _warn_of_rounding(call: Call) -> None:
    logger.warning(
        "%s is captured with libraries that compute as they do when they are traced: the same up to"
        " rounding, but not eager's bits (%s)",
        getattr(call.fn, "__qualname__", repr(call.fn)),
        call.besides.as_traced,
    )


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
    call: Call,
    communication: MarkedCommunication | None = None,
    *,
    lasts: bool = False,
    held: Set[str] = frozenset(),
) -> CapturedStep:
    """`capture`, of arguments already taken apart, with the markers that `parallelize` expands.

    Args:
        lasts: state that optimizers make in their first step is made before it is traced.
        held: see `finish`.
    """
    alone = _compat.rank_among_several() is None  # else a rank may wait for what another one does
    with ExitStack() as stack:
        for context in (
            taking_turns() if alone else nullcontext(),
            *(dispatch_keys_kept(), _compat.unwatched(), _compat.without_fake_mode()),
            collector_paused(),
            births_noted(),
        ):
            stack.enter_context(context)
        call = call.with_whole_objects()
        while True:
            call, inputs, raw, made = trace_from_state(call, communication, lasts=lasts)
            try:
                with made.present():
                    return finish(call, communication, inputs, raw, made, held=held)
            except (MoreInputs, CaptureError) as error:
                call = retried(call, inputs, error)


def trace_from_state(
    call: Call, communication: MarkedCommunication | None, *, lasts: bool
) -> tuple[Call, Inputs, RawTrace, NewState]:
    """The first trace of a call, from the state that its optimizers make in it, where that is known
    beforehand.

    Args:
        lasts: see `capture_call`.
    """
    made = state_beforehand(call) if lasts else NO_STATE
    with made.present():
        traced, inputs, raw = first_trace(call, communication)
    found = with_state_used(traced, made, inputs, raw) if made else (inputs, raw, made)
    if found is not None and not (made and raw.signature.states):
        return traced, *found
    return *first_trace(call, communication), NO_STATE


def first_trace(
    call: Call, communication: MarkedCommunication | None
) -> tuple[Call, Inputs, RawTrace]:
    """The first trace of a call that has all that it works on, and that call.

    Raises:
        CaptureError: the step cannot be captured.
    """
    refuse_kept_casts()
    alone = communication is None
    while True:
        try:
            inputs = prepare(call)
        except CaptureError:  # of what the step may leave alone
            if not call.remembered:
                raise
            call = without(call, call.remembered)
            continue
        try:
            raw = trace(call, inputs, communication)
        except (MoreInputs, CaptureError) as error:
            left_alone = error.idle if isinstance(error, MoreInputs) and alone else ()
            call = retried(without(call, left_alone), inputs, error)
            continue
        left_alone = idle_in(raw.graph_module.graph, call, inputs, raw.signature.stepped)
        if left_alone and alone:  # others may use it in a branch of their own
            call = without(call, left_alone)
            continue
        uses_none = not inputs.module_tensors and not call.modules
        if uses_none and not alone and not trained_objects(call.fn, call.leaves):
            raise CaptureError(
                "there is no torch.nn.Module among its arguments, and it reaches none",
                location=str(definition_of(call)),
                hint="pass the model and the optimizer to the step: step(model, optimizer, batch)",
            )
        return call, inputs, raw


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
            location=str(definition_of(call)),
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


def prepare(call: Call) -> Inputs:
    """Check the arguments and find every input. Touches nothing.

    Raises:
        CaptureError: the arguments hold what cannot be captured exactly.
    """
    with explained(call):
        check_supported(call)
        for position in call.constants:
            if is_array(call.leaves[position]):
                what = f"argument {call.names[position]}"
                raise HostWork.ARRAY.refused(what, str(definition_of(call)))
        return collect(call)


def communication_for(
    parallel: Parallel, agreed: AgreedOrder | None = None, *, accumulated: bool = True
) -> MarkedCommunication | None:
    """What a trace needs to know of the process group; `agreed` and `accumulated`: see there."""
    if not isinstance(parallel, OverRanks):
        return None
    group = parallel.everyone
    named = Group(group.group_name, group.size())
    buffers = group_of_buffers(group)
    return MarkedCommunication(parallel, named, buffers, agreed, accumulated)
