"""Traces a step by running it once on fake tensors, in-place operators included.

The result is the raw graph from which `functional` makes the captured dialect. The technique is
that of `make_fx`: the step runs once on fake tensors, with autograd on, while every operator below
autograd is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.ctc import register_ctc_shapes
from graphopt._compat.threads import taking_turns
from graphopt.errors import CaptureError
from graphopt.ir.families import FUSED_OPTIMIZERS
from graphopt.ir.source import SourceLine
from graphopt.parallel.sharding import is_dtensor
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.implicit import ImplicitInputs, MoreInputs, NamedModules
from graphopt.tracing.inputs.remembered import idle_in
from graphopt.tracing.layouts import strides, trusted
from graphopt.tracing.layouts.parts_of_storage import of_their_own
from graphopt.tracing.layouts.sparse import refuse_counts
from graphopt.tracing.optimizers.optimizer_state import entries_at
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.outside.steps import not_repeated, refuse_unrepeated
from graphopt.tracing.ranks.reduction import MarkedCommunication
from graphopt.tracing.ranks.shards import whole_fake
from graphopt.tracing.refusals.failures import definition_of, explained, raised_by_step
from graphopt.tracing.refusals.host_work import HostWork
from graphopt.tracing.refusals.unknown_features import check_layout, refuse_unseen_results
from graphopt.tracing.results.signature import Signature
from graphopt.tracing.rollback.generators import GeneratorStates, undrawn
from graphopt.tracing.rollback.host_state import HostState, check_effects, drawn_from
from graphopt.tracing.rollback.substitute import preserved
from graphopt.tracing.step_run import StepRun
from graphopt.tracing.tensors.lost_history import without_history


@dataclass
class RawTrace:
    """A traced step: `graph_module(*placeholders)` gives the list of results.

    Attributes:
        step: the function.
        inputs: what the graph takes, with their values.
        modules: all modules of the step, with names.
        besides: what it works on besides its arguments.
        used: parameters whose gradients were marked here, in the order they were ready, with the
            rounds of averages in which they were.
        begins_otherwise: a call that makes optimizer state does otherwise than those after it.
        outside: what the step read outside its arguments.
    """

    step: Callable[..., Any]
    inputs: Inputs
    values: list[torch.Tensor]
    modules: NamedModules
    besides: ImplicitInputs
    graph_module: fx.GraphModule
    signature: Signature
    fakes: list[torch.Tensor]
    used: dict[str, tuple[int, ...]]
    outside: OutsideRecord
    begins_otherwise: bool


def trace(call: Call, inputs: Inputs, communication: MarkedCommunication | None) -> RawTrace:
    """Traces the step of `call` by running it once on fake tensors.

    Raises:
        CaptureError: the step does what no graph can repeat. Nothing has changed then.
        MoreInputs: it works on more than `inputs`. Nothing has changed then, either.
    """
    _compat.register_fused_meta_kernels(f"{name}_" for name in FUSED_OPTIMIZERS)
    register_ctc_shapes()
    with taking_turns(), call.besides.present():
        return _restored(call, inputs, communication)


def _restored(call: Call, inputs: Inputs, communication: MarkedCommunication | None) -> RawTrace:
    """Makes one trace. Afterwards everything that the step can reach is as it was; see
    `rollback.host_state`."""
    state = HostState(call.fn, call.leaves)
    try:
        raw, drawn = _traced(call, inputs, communication, state)
    finally:
        effects = state.restore()
    with explained(call.fn):
        check_effects(effects)
    drawn = drawn_from(effects) or drawn
    if drawn is not None:
        raise HostWork.DRAW.refused(drawn, definition_of(call.fn))
    if effects and raw.outside.unrepeated.first is None:
        what, line = effects.first_change(raw.outside, raw.modules)
        raw.outside.unrepeated.add(what, line or definition_of(call.fn))
    return raw


def _traced(
    call: Call, inputs: Inputs, communication: MarkedCommunication | None, state: HostState
) -> tuple[RawTrace, str | None]:
    """Makes one trace; also returns the generator of Python or numpy that has advanced, if any."""
    values = inputs.live_values(call)
    mode = _compat.fake_mode_of(values) or _compat.new_fake_mode(
        strides.corrected, trusted.check, strides.known
    )
    with explained(call.fn):
        for value, (_, name) in zip(values, inputs.kinds_and_names(), strict=True):
            check_layout(name, value)
    apart = of_their_own(inputs.kinds_and_names(), values)
    fakes = [
        whole_fake(mode, value)
        if is_dtensor(value)
        else _compat.to_fake(mode, without_history(value))
        for value in apart
    ]
    run = StepRun(call, inputs, communication, mode, values, state)
    try:
        raw, drawn = _run_once(run, call, inputs, fakes)
        if not any(map(_compat.is_fake, values)):
            refuse_unseen_results(raw.graph_module.graph)
        return raw, drawn
    except CaptureError as error:
        if run.made.refused is not None and run.made.refused.final:  # perhaps swallowed by the step
            raise run.made.refused from None
        if run.outside.unrepeated.once:
            with explained(call.fn):
                refuse_unrepeated(run.outside)
        if run.finder.found:
            raise MoreInputs(run.finder.found) from error
        own = raised_by_step(error)
        if own is not None and inputs.answers and inputs.guessed is None:
            raise own from None  # as eager code raises it for these values
        raise
    finally:
        inputs.meets_sizes |= _compat.met_sizes(mode)


def _run_once(
    run: StepRun, call: Call, inputs: Inputs, fakes: list[torch.Tensor]
) -> tuple[RawTrace, str | None]:
    with ExitStack() as stack:
        stack.callback(run.outside.close)
        opened = [each.table for each in call.objects.tables]
        others = [call.leaves[position] for position in call.constants]
        kept = preserved(
            run.modules, call.optimizer_objects(), others, opened, call.besides.carried
        )
        stack.enter_context(kept)
        stack.enter_context(explained(call.fn))
        stack.enter_context(_compat.foreach_accepts_fakes())
        stack.enter_context(_compat.errors_raised_once())
        generators = GeneratorStates()
        stack.enter_context(undrawn())
        with nullcontext() if fakes else run.mode:  # else torch finds the mode of the inputs
            graph_module = _compat.make_fx(run)(*fakes)
        refuse_counts(graph_module.graph)
        drawn = generators.advanced()
        _refuse_kept_numbers(run, _numbers_of(call) | run.kept_numbers)
    if run.finder.found:
        more = MoreInputs(run.finder.found)
        if run.signature is not None:
            more.idle = idle_in(graph_module.graph, call, inputs, run.signature.stepped)
        raise more
    assert run.signature is not None
    _refuse_kept_numbers(run, set())
    run.made.add(run.finder.let_go())
    _refuse_kept_tensors(run, fakes)
    if run.outside.refused is not None:
        raise run.outside.refused
    raw = RawTrace(
        step=call.fn,
        inputs=inputs,
        values=run.values,
        modules=run.modules,
        besides=call.besides,
        graph_module=graph_module,
        signature=run.signature,
        fakes=fakes,
        used=run.used,
        outside=run.outside,
        begins_otherwise=run.begins_otherwise,
    )
    return raw, drawn


def _refuse_kept_tensors(run: StepRun, fakes: list[torch.Tensor]) -> None:
    """Refuses a step that keeps a traced tensor, for example in a list that it closes over."""
    kept = run.made.kept({id(fake) for fake in fakes})
    if kept is not None:
        shape, line = kept
        what = f"a tensor of shape {shape} outside the model and its return value"
        raise _keeps(run, what, line)


def _numbers_of(call: Call) -> set[int]:
    """The ids of numbers that optimizers and input places hold during the trace."""
    placed = [each.place.now() for each in call.besides.carried]
    known = set(map(id, _compat.tree_leaves(placed)))
    known.update(id(field.place.now()) for field in call.objects.fields)
    for optimizer in call.optimizer_objects():
        for table in (*optimizer.param_groups, *map(entries_at, optimizer.state.values())):
            known.update(map(id, _compat.tree_leaves(list(table.values()))))
    return known


def _refuse_kept_numbers(run: StepRun, known: set[int]) -> None:
    """Refuses a step that keeps a number read from a tensor elsewhere than in `known`."""
    kept = run.made.kept_number(known)
    if kept is not None:
        what = (
            "a number that it read from a tensor (`.item()`) or drew at random outside its return"
            " value"
        )
        raise _keeps(run, what, kept[0])


def _keeps(run: StepRun, what: str, line: SourceLine | None) -> CaptureError:
    """Builds the error for a step that keeps a traced value, or a more specific refusal if there is
    one."""
    first = run.outside.unrepeated.first
    return (
        run.outside.refused
        or (None if first is None else not_repeated(*first))
        or CaptureError(
            f"it keeps {what}, which would happen at capture only",
            location=line or definition_of(run.step),
            hint="let a function do it that is called in every step: graphopt.callback("
            "history.append, loss); or return it from the step and keep it outside",
        )
    )
