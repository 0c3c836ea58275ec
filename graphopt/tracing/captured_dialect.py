"""The stages between the trace of a step and the captured dialect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import fx

from graphopt.guards.outside import OutsideGuard
from graphopt.ir.placement import Placement, set_placement
from graphopt.parallel import Manual
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.effects.decisions import another_on_each_rank
from graphopt.tracing.functional.functionalization import functionalize, name_placeholders
from graphopt.tracing.inputs.entries import InputSpec, Kind, PlacedNumber
from graphopt.tracing.inputs.found_places import found_places
from graphopt.tracing.inputs.notes import (
    forget_unwritten,
    held_names,
    note_dead_gradients,
    note_held,
    note_returned,
    note_unread_numbers,
    refuse_shared_updates,
)
from graphopt.tracing.optimizers.new_state import NewState
from graphopt.tracing.ranks.reduction import MarkedCommunication
from graphopt.tracing.ranks.shards import placements, shard_made
from graphopt.tracing.ranks.uniformity import first_own, own_inputs
from graphopt.tracing.refusals.failures import explained
from graphopt.tracing.rollback.host_state import refuse_left
from graphopt.tracing.trace import RawTrace

logger = logging.getLogger("graphopt")


def finish(
    raw: RawTrace,
    made: NewState,
    communication: MarkedCommunication | None,
    held: Set[str] = frozenset(),
) -> CapturedStep:
    """Makes a `CapturedStep` in the captured dialect from a trace.

    Args:
        made: optimizer state that has been made for the trace, and is there.
        held: names of what any rank holds in a way in which its use is not seen.

    Raises:
        CaptureError: the step leaves something on the host.
        OwnDecisionError: it decides by values that may differ between ranks.
    """
    refuse_left(raw.outside)
    inputs, besides = raw.inputs, raw.besides
    parallel = Manual() if communication is None else communication.parallel
    if besides.as_traced:
        _warn_of_rounding(raw.step, besides.as_traced)
    graph_module = _functional(raw)
    if communication is not None:
        own = own_inputs(inputs, raw.modules, broadcast=communication.parallel.broadcast)
        assumed = first_own(graph_module.graph, inputs, own, raw.signature, communication.group)
        if assumed is not None:  # on values that may differ between ranks
            raise another_on_each_rank(assumed.line)
    kinds = list(inputs.kinds_and_names())
    specs = _described(graph_module, kinds, placements(inputs, raw.values, parallel))
    _note_uses(graph_module, specs, raw, held)
    with besides.present():
        outside = OutsideGuard(raw.outside, _changed_objects(raw))
    made = NewState(shard_made(made.entries, parallel), [*made.attributes, *besides.made])
    return CapturedStep(
        graph_module,
        specs,
        raw.signature,
        inputs,
        outside,
        replace(besides, rounds=0),
        made or None,
        parallel,
        tuple(found_places(raw.outside, raw.modules)),
    )


def _functional(raw: RawTrace) -> fx.GraphModule:
    """Functionalizes the graph of a trace.

    Raises:
        CaptureError: the step writes where a graph cannot follow.
    """
    with explained(raw.step):
        graph_module, updated = functionalize(raw)
    forget_unwritten(graph_module, raw.inputs, raw.signature)
    refuse_shared_updates(raw, updated)
    return graph_module


def _described(
    graph_module: fx.GraphModule, kinds: Sequence[tuple[Kind, str]], placed: Mapping[int, Placement]
) -> tuple[InputSpec, ...]:
    """Names the graph's inputs and sets their placements, by position."""
    names = name_placeholders(graph_module.graph, kinds)
    graph_module.recompile()
    specs = tuple(
        InputSpec(kind, fqn, name, placed.get(index, Placement.FULL))
        for index, ((kind, fqn), name) in enumerate(zip(kinds, names, strict=True))
    )
    for node, spec in zip(graph_module.graph.nodes, specs, strict=False):
        set_placement(node, spec.placement)
    return specs


def _note_uses(
    graph_module: fx.GraphModule, specs: tuple[InputSpec, ...], raw: RawTrace, held: Set[str]
) -> None:
    """Marks inputs that others hold, and inputs that nobody reads."""
    inputs = raw.inputs
    note_returned(graph_module, inputs, raw.signature)
    note_dead_gradients(graph_module, specs, inputs, raw.signature)
    note_unread_numbers(graph_module, inputs)
    inputs.rebound = list(raw.signature.rebound)
    note_held(graph_module, inputs, held_names(raw), held)


def _changed_objects(raw: RawTrace) -> list[Any]:
    """The outside objects from which a graph takes a value that it changes: each call needs the
    same ones."""
    inputs, placed = raw.inputs, [each.place for each in raw.signature.placed]
    lists = tuple(place.holder for place in placed if type(place.holder) is list)
    inputs.hyperparameters = [
        replace(each, apart=lists) if isinstance(each, PlacedNumber) else each
        for each in inputs.hyperparameters
    ]
    places = [*placed, *(each.place for each in raw.besides.carried)]
    places += [each.place for each in inputs.hyperparameters if isinstance(each, PlacedNumber)]
    for place in places:
        raw.outside.need(place.holder)
        raw.outside.need(raw.outside.owner(place.holder))
    return [place.holder for place in places]


def _warn_of_rounding(fn: Callable[..., Any], reason: str) -> None:
    logger.warning(
        "%s is captured with libraries that compute as they do when they are traced: the same up to"
        " rounding, but not eager's bits (%s)",
        getattr(fn, "__qualname__", repr(fn)),
        reason,
    )
