"""The function that is traced: inserts stand-ins, runs the step, and collects its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.cached_tracing import remembered
from graphopt.host.seen import viewed_by
from graphopt.tracing.call import Call
from graphopt.tracing.effects import torch_generators as rng
from graphopt.tracing.effects.argument_changes import ContainerChange, GivenContainers
from graphopt.tracing.effects.callback_view import HostView
from graphopt.tracing.effects.decisions import Decider
from graphopt.tracing.effects.state_writes import take_placed
from graphopt.tracing.effects.written_values import (
    MadeAnew,
    attribute_told,
    change_told,
    tell_shared,
)
from graphopt.tracing.exactness import fast_path, formulas
from graphopt.tracing.functional.tagging import Tagger, tagged
from graphopt.tracing.inputs.collecting import found_twice
from graphopt.tracing.inputs.entries import ArgumentNumber, Inputs, PlacedNumber
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.inputs.stand_ins import arguments_of, stand_ins_of
from graphopt.tracing.interception.class_questions import asking
from graphopt.tracing.interception.inference import inference_as_no_grad
from graphopt.tracing.interception.redirect import Redirect
from graphopt.tracing.interception.replaced_functions import replaced
from graphopt.tracing.interception.storage_identity import identities_refused
from graphopt.tracing.interception.tracing_questions import answered_as_in_eager
from graphopt.tracing.optimizers.first_gradients import FirstGradients
from graphopt.tracing.optimizers.noticed_steps import notice_steps
from graphopt.tracing.optimizers.scaling import TracedScaling
from graphopt.tracing.optimizers.watched_state import watched
from graphopt.tracing.outside.steps import (
    gives,
    observed_step,
    pin_left,
    record_for,
    refuse_found_twice,
)
from graphopt.tracing.ranks import reduction
from graphopt.tracing.ranks.collectives import functional_collectives
from graphopt.tracing.ranks.shared_by_ranks import SharedByRanks
from graphopt.tracing.ranks.uniformity import own_inputs
from graphopt.tracing.refusals import impurity
from graphopt.tracing.refusals.cached_functions import cached_function
from graphopt.tracing.refusals.calls import SubstitutedCalls
from graphopt.tracing.refusals.host_reads import no_reading
from graphopt.tracing.refusals.host_writes import no_printing
from graphopt.tracing.refusals.kept_casts import StepCasts
from graphopt.tracing.results.collector import ResultCollector, TraceOutcome
from graphopt.tracing.results.recipes import Recipes
from graphopt.tracing.results.signature import PlacedResult, Signature, leaves_of
from graphopt.tracing.rollback.host_state import HostState
from graphopt.tracing.rollback.substitute import (
    StandIns,
    has_left_over,
    insert,
    inserted_containers,
)
from graphopt.tracing.rollback.tensor_keys import found_as_keys, identified
from graphopt.tracing.scalars import numbers
from graphopt.tracing.scalars.conversions import converted, converting
from graphopt.tracing.scalars.host_math import traced_math
from graphopt.tracing.scalars.positions import Positions, takes_positions
from graphopt.tracing.tensors.aliases import Aliases
from graphopt.tracing.tensors.attributes import AttributeChange, StandInAttributes, marks_kept
from graphopt.tracing.tensors.attributes_before import AttributesBefore
from graphopt.tracing.tensors.constants import by_class
from graphopt.tracing.tensors.obtained import ObtainedValues
from graphopt.tracing.tensors.rebinding import Rebinding
from graphopt.tracing.tensors.replaced import take_replaced

Scene = Iterator[AbstractContextManager[Any]]
"""Contexts, each of which is entered before the next one is made."""


class StepRun:
    """The function that is traced.

    Attributes:
        step: the user's function.
        modules: all modules of the step, with names.
        values: of the inputs.
        made: what the step has got from torch.
        outside: what it has read and written outside its arguments.
        finder: what is to be an input besides.
        signature: what the results are for; None before the step has run.
        used: parameters whose gradients are marked, in the order they were ready, with the rounds
            of averages in which they are.
        kept_numbers: results that are numbers (by id).
        begins_otherwise: a call that makes optimizer state does otherwise than those after it.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        communication: reduction.MarkedCommunication | None,
        mode: Any,
        values: list[torch.Tensor],
        state: HostState,
    ) -> None:
        self._call, self._inputs, self._communication = call, inputs, communication
        self.mode, self.values, self.step = mode, values, call.fn
        self.modules = list(call.named_submodules())
        self._optimizers = call.optimizer_objects()
        self.state = state
        self._casts = StepCasts()
        self._alone = communication is None and _compat.rank_among_several() is None
        self._tagger = Tagger({module: name for name, module in self.modules})
        self._gradients = FirstGradients()
        self._shared = SharedByRanks(
            *(communication, [root for _, root in call.named_roots()], inputs, self._tagger),
            lambda: self.made.decider,
            self._gradients,
        )
        of_step = (ArgumentNumber, PlacedNumber)
        given = {i for i, n in enumerate(inputs.hyperparameters) if isinstance(n, of_step)}
        self.made = ObtainedValues(self._tagger, given)
        places = [n.place for n in inputs.hyperparameters if isinstance(n, PlacedNumber)]
        self.outside = record_for(call, places)
        known = {id(call.leaves[position]) for position in (*call.modules, *call.optimizers)}
        self.finder = ImplicitInputFinder(self.outside, known, mode, call.besides)
        self._aliases = Aliases(self._optimizers, inputs)
        self.signature: Signature | None = None
        self.used: dict[str, tuple[int, ...]] = {}
        self.kept_numbers: set[int] = set()
        self.begins_otherwise = False
        self._left: MadeAnew = {}
        self._view: HostView

    def __call__(self, *flat: torch.Tensor) -> list[Any]:
        self._answer_questions()
        with ExitStack() as stack:
            for context in self._tracing():
                stack.enter_context(context)
            with self._tagger.during("optimizer"):
                traced = stand_ins_of(self._call, self._inputs, flat, self.made)
            self.outside.stands_for = self._originals(traced)
            stack.enter_context(found_as_keys(self.outside.stands_for))
            _compat.copy_hooks(
                (entry.tensor, traced.by_id[id(entry.tensor)]) for entry in self._inputs.parameters
            )
            self.outside.left_over = frozenset(map(id, filter(has_left_over, self._optimizers)))
            insert(self._optimizers, self._inputs, traced)
            self.outside.stand_in_containers = inserted_containers(self._inputs)
            marks = StandInAttributes(self._call.leaves, self._inputs, traced)
            held = AttributesBefore(self._call, self.outside, traced.by_id, self._alone)
            self._shared.begin(traced)
            self._view = HostView(self._optimizers, self.outside, held.tables, held.groups)
            ran = self._run(traced, held)
            return self._collect(flat, traced, marks, held, ran)

    # ------------------------------------------------------------------ the scene

    def _answer_questions(self) -> None:
        """Starts answering the step's questions about values."""
        inputs, communication, tracer = self._inputs, self._communication, _compat.current_tracer()
        begin_alike = communication is not None and communication.parallel.broadcast
        own = own_inputs(inputs, self.modules, broadcast=begin_alike)
        group = None if communication is None else communication.group
        self.made.decider = Decider(
            *(tracer, inputs, self.mode, self.values, own, self._alone),
            *(group, self._call.decides_alone),
        )
        self.made.positions = Positions(tracer, self.mode, inputs.conditions)

    def _tracing(self) -> Scene:
        """Yields the contexts for all of the trace: stand-ins, step, and results."""
        yield remembered()
        yield tagged(_compat.current_tracer(), self._tagger.tag)
        yield self._casts.active()
        yield torch.autograd.set_multithreading_enabled(self._on_one_device())
        if self._alone and not self._is_told():
            yield answered_as_in_eager(self._notice_question)
        yield _compat.sizes_given(self.mode, self.made.decider.sized)
        yield marks_kept(self._inputs)

    def _is_told(self) -> bool:
        """True if libraries may notice that the step is traced."""
        return bool(self._call.besides.as_traced) or any(map(_compat.is_fake, self.values))

    def _is_made_here(self, optimizer: Optimizer) -> bool:
        """True if the step created an optimizer itself and no gradients are averaged."""
        return self._communication is None and not self.outside.is_outside(optimizer)

    def _notice_question(self) -> None:
        self._inputs.asked = True

    def _on_one_device(self) -> bool:
        """True if all gradients are computed by autograd's thread for one device.

        Operators of a double backward are numbered by the thread that records them, and the
        numbers decide in which order gradients are added: it has to be the thread that eager has.
        """
        devices = {entry.tensor.device for entry in self._inputs.parameters}
        return len(devices) == 1 and devices.pop().type != "cpu"

    def _running(self) -> Scene:
        """Yields the contexts that are active while the step runs."""
        optimizers, own = self._optimizers, self._is_made_here
        yield inference_as_no_grad()
        yield fast_path.as_in_eager()
        yield formulas.as_in_eager()
        yield no_reading()
        yield no_printing()
        yield impurity.no_other_optimizers(optimizers, self.finder.optimizer, own)
        yield rng.traced_generators()
        yield numbers.noting(self.made)
        yield replaced(
            _compat.truths_of_fakes(numbers.truth),
            _compat.floats_of_statistics(converted),
            _compat.moved_where_needed(),
        )
        yield traced_math()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            yield functional_collectives()
        yield identities_refused()
        yield identified(self.outside.stands_for)
        yield from self._shared.running()

    # ------------------------------------------------------------------ the step

    def _run(self, traced: StandIns, held: AttributesBefore) -> TraceOutcome:
        args, kwargs = arguments_of(self._call, self._inputs, traced)
        given = GivenContainers(args, kwargs, self._call.objects, self.outside.refused_change)
        self._view.given, self.outside.of_call = given.paths(), given.places()
        optimizers = self._optimizers
        tensors = [entry.tensor for entry in self._inputs.module_tensors]
        self.outside.stand_ins = WeakValueDictionary(
            {id(tensor): traced.by_id[id(tensor)] for tensor in tensors}
        )
        self.outside.storages = frozenset(map(_compat.storage_key, traced.by_id.values()))
        with ExitStack() as stack:
            stack.callback(self._find_owners)  # also where the step is refused
            for context in self._running():
                stack.enter_context(context)
            stepped = notice_steps(
                *(optimizers, self._tagger, self._view.steps, self._communication is not None)
            )
            rebinding = Rebinding(self._call.leaves, self._inputs, traced)
            redirect = Redirect(
                *(traced, self._tagger, self._shared, self.made, optimizers),
                *(self.finder, rebinding, self._gradients),
            )
            scalers = TracedScaling(self.finder, _compat.fake_mode_of(self.values))
            for context in (
                *(scalers.active(), redirect.in_backwards(), redirect),
                viewed_by(self._view),
            ):
                stack.enter_context(context)
            instead = self._instead()
            self._aliases.watch(self.outside)
            with observed_step(self._call, self.outside, instead):
                states = [optimizer.state for optimizer in optimizers]
                with watched(states):
                    returned = self._call.fn(*args, **kwargs)
                self.begins_otherwise = any(getattr(s, "begins_otherwise", True) for s in states)
                scalers.finish()
                call = self._call
                refuse_found_twice(self.outside, call.given, given.changes())
                self._give(returned)
                placed = self._left_outside(traced, held)
                told, changes = self._tell(held, given, returned)
        rebinding.finish()
        if self.made.refused is not None:
            raise self.made.refused
        self._shared.mark()
        flat = _compat.flatten_results(returned, self._stays)
        made, self._left = self._left, {}
        return TraceOutcome(*flat, stepped, placed, made, changes, rebinding, told)

    def _tell(
        self, held: AttributesBefore, given: GivenContainers, returned: Any
    ) -> tuple[list[AttributeChange], list[ContainerChange]]:
        """The changes of attributes and argument containers that each call makes."""
        record, made = self.outside, self._left
        held.refuse_deleted()
        held_now = list(held.changes())
        attributes = [attribute_told(record, change, made) for change in held_now]
        changes = [change_told(record, change, made) for change in given.changes()]
        tell_shared(record, [returned, *(each.after for each in held_now)], self._stays, made)
        return attributes, changes

    def _originals(self, traced: StandIns) -> dict[int, torch.Tensor]:
        """Maps ids of stand-ins to tensors that the step may also hold elsewhere."""
        tensors = [entry.tensor for entry in self._inputs.module_tensors]
        tensors += [self._call.leaves[position] for position in self._inputs.user]
        return {id(traced.by_id[id(tensor)]): tensor for tensor in tensors}

    def _instead(self) -> SubstitutedCalls:
        """Returns what gives the replacement of a callee, or None.

        Raises:
            CaptureError: it is work on the host.
        """
        kinds: tuple[Callable[[Any, Sequence[Any]], Any], ...] = (
            *(partial(asking, self.outside.stands_for), converting, takes_positions, by_class),
            partial(cached_function, self.outside),
        )
        return SubstitutedCalls(self.outside.is_outside, kinds)

    # ------------------------------------------------------------------ what it leaves

    def _give(self, returned: Any) -> None:
        """Handles the step's return value while everything that it stored is still in place."""
        self.outside.note_left_in()
        gives(self.outside, _compat.result_parts(returned, self._stays))
        self._view.finish()

    def _left_outside(self, traced: StandIns, held: AttributesBefore) -> list[PlacedResult]:
        """Takes out the values that the step has stored outside its arguments."""
        tables = [*held.objects, *(each.table for each in self._call.objects.tables)]
        placed = take_placed(self.outside, self.finder, traced, tables, self._left)
        self.outside.refuse_changed(self.state.puts_back)
        return placed

    def _find_owners(self) -> None:
        """Looks for further inputs: modules that own bare tensors, and optimizers whose state the
        step uses."""
        self.finder.owners_of([each.tensor for each in self._inputs.module_tensors if each.bare])
        self.finder.found.found_twice |= found_twice(self._inputs, self.outside)
        for optimizer in self.outside.optimizers.values():
            self.finder.optimizer(optimizer)

    def _stays(self, value: object) -> bool:
        """True if a returned object or container existed before or is also stored elsewhere, or if
        an object is more than its fields or of a class that the step makes."""
        elsewhere = id(value) in self.outside.of_call or id(value) in self._left
        is_there = elsewhere or self.outside.is_outside(value)
        if isinstance(value, (list, dict, deque)):
            return is_there
        kinds = (torch.nn.Module, torch.Tensor, Optimizer)
        return isinstance(value, kinds) or is_there or not self.outside.is_outside(type(value))

    def _collect(
        self,
        flat: Sequence[torch.Tensor],
        traced: StandIns,
        marks: StandInAttributes,
        held: AttributesBefore,
        ran: TraceOutcome,
    ) -> list[Any]:
        """Builds the signature of the graph's results. Returns the results."""
        marked = list(marks.changes())
        counted = held.counted(self.finder)
        modules = [module for _, module in self.modules]
        take_replaced(
            *(modules, self._call.besides.replaced, self.outside, self.finder),
            *(self._inputs, traced, self._alone),
        )
        held.note_counted(self.finder)
        rebinding = ran.rebinding
        recipes = Recipes(
            *(self.step, self._inputs, traced, flat, self.made, rebinding.left_storages),
            outside=self.outside,
            left=ran.made,
        )
        collector = ResultCollector(
            *(self._call.leaves, self._optimizers, self._inputs),
            *(traced, recipes, self._gradients),
        )
        told = {(id(each.table), each.key): each for each in ran.told if each.is_told}
        left = (told.get((id(each.table), each.key), each) for each in held.left())
        signature = self.signature = collector.collect(ran, left, counted)
        left_in = (leaf for each in signature.attributes for leaf in leaves_of(each.recipe))
        pin_left(self.outside, left_in)
        signature.attributes += collector.attributes(marked)
        self._view.settle(signature)
        signature.data.update(recipes.computed(rebinding.given))
        signature.keeps_casts = self._casts.kept
        signature.rebound.update(recipes.computed(rebinding.rebound))
        marks.put_back()
        self.kept_numbers = recipes.numbers
        self.used = self._shared.finish()
        self.outside.of_call = {}  # which hold what is traced
        return recipes.results
