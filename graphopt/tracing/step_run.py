"""The function that is traced: it sets the scene, runs the step, and collects what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt._compat.backward import is_in_backward
from graphopt._compat.remembering import remembered
from graphopt.errors import CaptureError
from graphopt.host.seen import viewed_by
from graphopt.parallel import OverRanks
from graphopt.parallel.markers import Group
from graphopt.tracing import impurity, numbers, reduction, rng
from graphopt.tracing.alike import own_inputs
from graphopt.tracing.asked import answered_as_in_eager
from graphopt.tracing.besides import Finder
from graphopt.tracing.call import Call, SizesKept
from graphopt.tracing.changed import take_changed
from graphopt.tracing.collectives import functional_collectives, stand_in_of_collective
from graphopt.tracing.conversions import converted, converting
from graphopt.tracing.decisions import Decider
from graphopt.tracing.draws.calls import Substitutes
from graphopt.tracing.draws.live import insert_arrays, live_arrays, refuse_changed
from graphopt.tracing.draws.picked import StoredItem
from graphopt.tracing.draws.recorder import HostCalls
from graphopt.tracing.draws.rows import Row
from graphopt.tracing.given import GivenContainers
from graphopt.tracing.host_math import traced_math
from graphopt.tracing.host_numbers import is_host_number, stand_in_of_number
from graphopt.tracing.host_view import HostView
from graphopt.tracing.inference import inference_as_no_grad
from graphopt.tracing.inputs import ArgumentNumber, Inputs, PlacedNumber, Storage, is_number
from graphopt.tracing.keyed import identified, keyed_by_stand_ins
from graphopt.tracing.later import refuse_keys, refuse_written
from graphopt.tracing.laters import Laters
from graphopt.tracing.leftovers import HostState
from graphopt.tracing.lengths import Lengths
from graphopt.tracing.made_arrays import MadeArrays
from graphopt.tracing.marks import Marks, marks_kept
from graphopt.tracing.numbers import SYMBOLIC
from graphopt.tracing.numpy_lists import of_list, of_queue
from graphopt.tracing.obtained import ObtainedValues
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.steps import gives, observed_step, record_for
from graphopt.tracing.placed import note_counted, take_placed
from graphopt.tracing.rebinding import Rebinding
from graphopt.tracing.redirect import Redirect
from graphopt.tracing.replacing import Replacing
from graphopt.tracing.reshaping import Shape
from graphopt.tracing.result_collector import (
    Ran,
    ResultCollector,
    finish_buffers,
    module_attributes,
    plain_objects,
)
from graphopt.tracing.running_trace import values_of
from graphopt.tracing.scaling import traced_scaling
from graphopt.tracing.scheduled import computing
from graphopt.tracing.schedulers import traced_schedulers
from graphopt.tracing.signature import Signature
from graphopt.tracing.source import current_user_line, user_line_of
from graphopt.tracing.substitute import Traced, insert
from graphopt.tracing.tagging import Tagger, tagged


@dataclass(frozen=True)
class MarkedCommunication:
    """What is marked in this trace, for a kind of parallelism to expand.

    Attributes:
        parallel: the kind.
        group: ranks that share gradients and buffers.
        agreed: what the ranks average in this call; None before they have agreed.
        accumulated: whether gradients of earlier calls alone are averaged as well.
    """

    parallel: OverRanks
    group: Group
    agreed: reduction.AgreedOrder | None
    accumulated: bool = True


class StepRun:
    """The function that is traced: sets the scene, runs the step, collects what it leaves."""

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        communication: MarkedCommunication | None,
        mode: Any,
        values: list[torch.Tensor],
        state: HostState,
    ) -> None:
        self._keyed, self._puts_back = state.keyed_by_tensors(), state.puts_back
        self._values, self._mode = values, mode
        self.drawn: list[torch.Tensor] = []
        self.call, self.inputs, self.communication = call, inputs, communication
        names = {module: name for name, module in call.named_submodules()}
        self.tagger = Tagger(names)
        numbers_given = enumerate(inputs.hyperparameters)
        kinds = (ArgumentNumber, PlacedNumber)
        arguments = {i for i, number in numbers_given if isinstance(number, kinds)}
        self.made = ObtainedValues(self.tagger, arguments)
        self.signature: Signature | None = None
        self.used: tuple[str, ...] = ()
        self.kept_numbers: set[int] = set()
        self.gradients_first = False
        self.rebound: dict[int, torch.Tensor] = {}
        self.data_given: dict[int, torch.Tensor] = {}
        self.reshaped: dict[int, Shape] = {}
        self.left_storages: set[int] = set()
        placed = [n.place for n in inputs.hyperparameters if isinstance(n, PlacedNumber)]
        placed += [each.place for each in live_arrays(call.besides)]
        self.outside = record_for(call, placed)
        given = {id(call.leaves[position]) for position in (*call.modules, *call.optimizers)}
        self.finder = Finder(self.outside, given, mode, call.besides.carried)
        self._caching = torch.is_autocast_cache_enabled()
        self.view: HostView

    def __call__(self, *flat: torch.Tensor) -> list[Any]:
        tracer = _compat.current_tracer()
        with ExitStack() as stack:
            stack.enter_context(remembered())
            stack.enter_context(tagged(tracer, self.tagger.tag))
            stack.enter_context(_autocast_cache(self._caching))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self._on_one_device()))
            alone = self.communication is None and _compat.rank_among_several() is None
            if alone and not self._is_told():
                stack.enter_context(answered_as_in_eager(self._notice_question))
            begins_alike = self.communication is not None and self.communication.parallel.broadcast
            own = own_inputs(self.inputs, self.call, broadcast=begins_alike)
            group = None if self.communication is None else self.communication.group
            decider = Decider(
                tracer,
                self.inputs,
                self._mode,
                self._values,
                own,
                alone,
                group,
                self.call.votes_always,
            )
            self.made.decider = decider

            def added(value: torch.Tensor, stand_in: torch.Tensor) -> None:
                values.append(value)
                own.append(True)
                self.drawn.append(stand_in)

            values, inputs = self._values, self.inputs
            self.made.calls = HostCalls(
                *(tracer, self._mode, inputs.drawn, inputs.conditions, self.made, added),
                outside=self.outside.is_outside,
                alone=alone,
            )
            if self.inputs.sizes is not SizesKept.UNKNOWN:
                stack.enter_context(_compat.sizes_given(self._mode, decider.sized))
            with self.tagger.during("optimizer"):
                traced = self._stand_ins(flat)
            _compat.copy_hooks(
                (entry.tensor, traced.by_id[id(entry.tensor)]) for entry in self.inputs.parameters
            )
            stack.enter_context(marks_kept(self.inputs))
            insert(self.call, self.inputs, traced)
            insert_arrays(self.call.besides, self.made.calls, self.inputs)
            marks = Marks(self.call, self.inputs, traced)
            before = module_attributes(self.call)
            settings = [dict(group) for _, _, group in self._groups()]
            holders = [(name, holder, dict(holder)) for name, holder in plain_objects(self.call)]
            marker = self._gradient_marker(traced)
            tables = [attributes for _, attributes, _ in holders]
            self.view = self._viewing(traced, before, holders, settings)
            self.outside.laters = Laters(self.outside, self.made.decide_computed)
            stack.enter_context(values_of(self.outside.laters))
            ran = self._run(traced, marker, tables)
            marked = list(marks.changes())
            counted = self._counted(settings)
            replacing = Replacing(self.call, self.inputs, traced, self.outside, alone)
            finish_buffers(self.inputs, traced, replacing)
            self._note_counted(before, holders)
            collector = ResultCollector(
                self.call, self.inputs, traced, flat, self.made, self.left_storages
            )
            self.signature = collector.collect(ran, before, holders, counted)
            self.signature.attributes += collector.attributes_set(marked)
            self.view.settle(self.signature)
            self.signature.data.update(collector.computed(self.data_given))
            self.data_given.clear()
            self.signature.reshaped = self.reshaped
            marks.put_back()
            self.kept_numbers = collector.numbers
            self.signature.rebound.update(collector.left(self.rebound))
            self.used = tuple(marker.used) if marker is not None else ()
            return collector.results

    def _is_told(self) -> bool:
        """Whether libraries find out that the step is traced."""
        return bool(self.call.besides.as_traced) or any(map(_compat.is_fake, self._values))

    def _notice_question(self) -> None:
        self.inputs.asked = True

    def _on_one_device(self) -> bool:
        """Whether all gradients are computed by the thread that autograd has for one device.

        Operators of a double backward are numbered by the thread that records them, and the
        numbers decide in which order gradients are added: it has to be the thread that eager has.
        """
        devices = {entry.tensor.device for entry in self.inputs.parameters}
        return len(devices) == 1 and devices.pop().type != "cpu"

    def _groups(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Each distinct parameter group, with its place: the optimizer and the number there."""
        known: set[int] = set()
        for index, optimizer in enumerate(self.call.optimizer_objects()):
            for number, group in enumerate(optimizer.param_groups):
                if id(group) not in known:
                    known.add(id(group))
                    yield index, number, group

    def _viewing(
        self,
        traced: Traced,
        modules: Mapping[int, dict[str, Any]],
        holders: Iterable[tuple[str, dict[str, Any], dict[str, Any]]],
        settings: Sequence[dict[str, Any]],
    ) -> HostView:
        """Follows what the step leaves outside for functions on the host; args: as it found it."""
        tables = [(vars(m), modules[id(m)]) for _, m in self.call.named_submodules()]
        tables += [(now, before) for _, now, before in holders]
        groups = [
            (index, number, before)
            for (index, number, _), before in zip(self._groups(), settings, strict=True)
        ]
        return HostView(self.call, self.inputs, traced, self.outside, tables, groups)

    def _counted(self, before: list[dict[str, Any]]) -> list[tuple[int, int, str, Any]]:
        """Numbers of parameter groups that the step has changed: where, and what they are now."""
        found = []
        for old, (index, number, new) in zip(before, self._groups(), strict=True):
            for key in [key for key in {**old, **new} if new.get(key) is not old.get(key)]:
                if not is_number(new.get(key)) and not isinstance(new.get(key), SYMBOLIC):
                    raise CaptureError(
                        f"it changes {key!r} of an optimizer's parameter group",
                        hint="change it outside the step, between two calls",
                    )
                if key in old and not is_host_number(old[key]):
                    self.finder.count(key)
                found.append((index, number, key, new[key]))
        return found

    def _note_counted(
        self,
        modules: Mapping[int, dict[str, Any]],
        holders: Iterable[tuple[str, dict[str, Any], dict[str, Any]]],
    ) -> None:
        """Look for numbers in attributes of modules and other objects that the step has changed.

        Args:
            modules, holders: their attributes as the step found them; see `ResultCollector`.
        """
        tables = [(n, vars(m), modules[id(m)]) for n, m in self.call.named_submodules()]
        for name, now, before in (*tables, *holders):
            for key, value in now.items():
                if value is not before.get(key):
                    place = OutsidePlace("item", now, key)
                    path = f"{name}.{key}".strip(".")
                    note_counted(self.finder, path, place, before.get(key), value)

    def _run(
        self,
        traced: Traced,
        marker: reduction.GradientMarker | None,
        tables: Sequence[dict[str, Any]],
    ) -> Ran:
        leaves = [
            traced.by_id.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.call.leaves
        ]
        for number, stand_in in zip(self.inputs.hyperparameters, traced.numbers, strict=True):
            if isinstance(number, ArgumentNumber):
                leaves[number.position] = stand_in
        args, kwargs = self.call.rebuild(leaves)
        given = self.view.given = GivenContainers(args, kwargs)
        stepped: list[int] = []
        known = self.call.optimizer_objects()

        def mark() -> None:
            if marker is not None:
                marker.mark_ready()

        with ExitStack() as stack:
            bare = [entry.tensor for entry in self.inputs.module_tensors if entry.bare]
            stack.callback(self._find_owners, bare)  # also where the step is refused
            stack.enter_context(impurity.no_output())
            stack.enter_context(
                traced_schedulers((group for _, _, group in self._groups()), self.made.calls)
            )
            stack.enter_context(inference_as_no_grad())
            stack.enter_context(impurity.no_loading())
            stack.enter_context(traced_scaling(self.finder, _compat.fake_mode_of(self._values)))
            stack.enter_context(impurity.no_other_optimizers(known, self.finder.optimizer))
            stack.enter_context(rng.traced_generators())
            stack.enter_context(numbers.noting(self.made))
            stack.enter_context(_compat.truths_of_fakes(numbers.truth))
            stack.enter_context(traced_math())
            stack.enter_context(_compat.floats_of_statistics(converted))
            stack.enter_context(_compat.moved_where_needed())
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                stack.enter_context(functional_collectives())
            originals = self.outside.stands_for = self._originals(traced)
            stack.enter_context(identified(originals))
            self._notice_steps(stepped)
            if marker is not None:
                stack.enter_context(marker.watching())
                stack.enter_context(self._buffers_marked())
            rebinding = Rebinding(self.call, self.inputs, traced)
            redirect = Redirect(traced, self.tagger, mark, self.made, known, self.finder, rebinding)
            stack.enter_context(redirect)
            calls = stack.enter_context(self.made.calls)
            calls.makes_arrays = self.finder.shuffles
            tensors = [entry.tensor for entry in self.inputs.module_tensors]
            substitute = Substitutes(calls, self.outside, self.call.besides.shuffles, tensors)
            numbers_given = zip(self.inputs.hyperparameters, traced.numbers, strict=True)
            picks = substitute.picks
            self.outside.draws_items, self.outside.item_setter = picks.draws, picks.setter
            lengths = Lengths(numbers_given, self.outside)
            self.outside.length_of = lengths.of
            arrays = MadeArrays(self.outside, self.finder)
            stack.enter_context(viewed_by(self.view))

            def called(callee: Any, args: Sequence[Any]) -> Any:
                other = computing(callee, args) or converting(callee, args)
                other = other or of_list(callee, args) or of_queue(callee, args)
                other = other or lengths.asked(callee, args)
                other = other or arrays.maker(callee, args) or substitute(callee, args)
                return other or stand_in_of_collective(callee, args)

            with observed_step(self.call, self.outside, called):
                exchanged = self.call.besides.exchanged
                with keyed_by_stand_ins(self._keyed, self.outside, traced.by_id, exchanged):
                    returned = self.call.fn(*args, **kwargs)
                arrays.finish()
                for each in _dictionaries_in(returned):
                    refuse_keys(each)
                refuse_written(redirect.shared)
                self.outside.read_left()
                self.outside.note_left_in()
                gives(self.outside, returned, self.call)
                self.view.finish(self.outside.laters.lists)
                for path, place in self.outside.changed_lengths():
                    self.finder.carries(path, place, counted=True)
                made: dict[int, Any] = {}
                placed = take_placed(self.outside, self.finder, traced.by_id, tables, made)
                stored = picks.take_stored(made)
                changed = take_changed(self.outside, placed, self._puts_back, made)
                made.clear()
                user = (self.call.leaves[position] for position in self.inputs.user)
                picks.finish(traced.by_id[id(leaf)] for leaf in user)
                refuse_changed(calls, self.outside.written_arrays())
                rows: list[Row | StoredItem] = [
                    *substitute.rows.take(self.outside.is_used, self.outside.pin),
                    *stored,
                ]
            self.gradients_first = redirect.gradients_first
        rebinding.finish()
        self.rebound, self.left_storages = rebinding.rebound, rebinding.left_storages
        self.data_given = rebinding.given
        self.reshaped = rebinding.reshaping.reshaped
        if self.made.refused is not None:
            raise self.made.refused
        mark()
        flat = _compat.flatten_results(returned, self._stays)
        return Ran(*flat, stepped, placed, changed, rows, list(given.changes()))

    def _originals(self, traced: Traced) -> dict[int, torch.Tensor]:
        """Tensors that the step may hold elsewhere, by the ids of what stands for them."""
        tensors = [entry.tensor for entry in self.inputs.module_tensors]
        tensors += [self.call.leaves[position] for position in self.inputs.user]
        return {id(traced.by_id[id(tensor)]): tensor for tensor in tensors}

    def _find_owners(self, tensors: list[torch.Tensor]) -> None:
        """Look for what is to be an input besides: modules of these tensors, and optimizers whose
        state the step uses, stepped or not."""
        self.finder.owners_of(tensors)
        self.finder.found.exchanged |= self.outside.gone_through
        for optimizer in self.outside.optimizers.values():
            self.finder.optimizer(optimizer)

    def _stays(self, value: object) -> bool:
        """Whether a returned object was there before the step, or is more than its fields."""
        kinds = (torch.nn.Module, torch.Tensor, Optimizer)
        return isinstance(value, kinds) or self.outside.is_outside(value)

    def _stand_ins(self, flat: Sequence[torch.Tensor]) -> Traced:
        by_id: dict[int, torch.Tensor] = {}
        supply = iter(flat)
        for holder in self.inputs.placeholders:
            stand_in = next(supply)
            if not isinstance(holder, Storage):
                by_id[id(holder.tensor)] = _without_gradient(stand_in, holder.tensor)
                continue
            for member in holder.members:
                by_id[id(member.tensor)] = _member(stand_in, member.tensor)
        for state in self.inputs.states:
            by_id[id(state.read(self.call))] = next(supply)
        for state, owner in self.inputs.aliases:
            by_id[id(state.read(self.call))] = by_id[id(owner.tensor)].detach()
        gradients: dict[int, torch.Tensor] = {}
        for gradient in self.inputs.gradients:
            stand_in = next(supply)
            gradients[id(gradient.owner)] = stand_in
            by_id[id(gradient.owner.tensor)].grad = stand_in
            by_id[id(gradient.owner.tensor.grad)] = stand_in
        of_arguments = {position: next(supply) for position in self.inputs.argument_gradients}
        scheduled: list[Any] = []
        for index, number in enumerate(self.inputs.hyperparameters):
            tensor = next(supply)
            value = number.read(self.call)
            if isinstance(value, torch.Tensor):
                by_id[id(value)] = tensor
                scheduled.append(tensor)
            else:
                conditions = self.inputs.conditions
                scheduled.append(stand_in_of_number(tensor, value, index, conditions, self.made))
                self.made.add_number(scheduled[-1])
        for position in self.inputs.user:
            by_id[id(self.call.leaves[position])] = next(supply)
        for position, stand_in in of_arguments.items():
            leaf = self.call.leaves[position]
            by_id[id(leaf)].grad = by_id[id(leaf.grad)] = stand_in
        return Traced(by_id, scheduled, gradients)

    def _gradient_marker(self, traced: Traced) -> reduction.GradientMarker | None:
        if self.communication is None:
            return None
        return reduction.GradientMarker(
            parameters={e.fqn: traced.by_id[id(e.tensor)] for e in self.inputs.parameters},
            roots=self._roots_of_parameters(),
            group=self.communication.group,
            tagger=self.tagger,
            agreed=self.communication.agreed,
            ask=self._used_anywhere,
            accumulated=self.communication.accumulated,
            persistent=frozenset(id(gradient) for gradient in traced.gradients.values()),
        )

    def _roots_of_parameters(self) -> dict[str, int]:
        """By the name of each parameter, the number of the module that it belongs to; -1: none."""
        roots: dict[int, int] = {}
        for number, (_, root) in enumerate(self.call.named_roots()):
            for parameter in root.parameters():
                roots.setdefault(id(parameter), number)
        return {e.fqn: roots.get(id(e.tensor), -1) for e in self.inputs.parameters}

    def _used_anywhere(
        self, positions: Sequence[int], sent: Sequence[torch.Tensor]
    ) -> Sequence[int]:
        """Which parameters that this rank does not use are used by another one."""
        agreed = self.communication and self.communication.agreed
        assert agreed and self.made.decider is not None
        anywhere = agreed.anywhere or ()
        likely = tuple(int(agreed.names[position] in anywhere) for position in positions)
        return self.made.decider.used(positions, sent, likely)

    def _notice_steps(self, stepped: list[int]) -> None:
        """Note optimizer steps and give their nodes the optimizer's phase."""
        for index, optimizer in enumerate(self.call.optimizer_objects()):
            vars(optimizer)["step"] = self._noticed_step(index, optimizer, stepped)

    def _noticed_step(self, index: int, optimizer: Optimizer, stepped: list[int]) -> Any:
        step = optimizer.step

        def noticed(*args: Any, **kwargs: Any) -> Any:
            if self.communication is not None and is_in_backward():
                raise _in_backward(optimizer)
            stepped.append(index)
            self.view.steps(optimizer)
            with self.tagger.during("optimizer"), _branches_explained(optimizer):
                return step(*args, **kwargs)

        return noticed

    @contextmanager
    def _buffers_marked(self) -> Iterator[None]:
        """While active, a root module's forward begins with buffers that the ranks share."""
        communication = self.communication
        assert communication is not None
        if not communication.parallel.broadcast_buffers:
            yield
            return

        def mark(module: torch.nn.Module, args: Any) -> None:
            names = (name for name, _ in module.named_buffers())
            with torch.no_grad(), self.tagger.sending(*names):
                reduction.mark_buffers(module, communication.group)

        handles = [
            root.register_forward_pre_hook(mark, prepend=True)
            for _, root in self.call.named_roots()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _in_backward(optimizer: Optimizer) -> CaptureError:
    return CaptureError(
        f"{type(optimizer).__name__}.step() runs within the backward, where gradients are not"
        " averaged over the ranks yet",
        location=str(current_user_line()),
        hint="call it after loss.backward()",
    )


def _without_gradient(stand_in: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """A fake mode of the user's gives the same stand-in again while anything holds it, such as the
    traceback of a refusal; what a trace has left in it goes."""
    if stand_in is not live and stand_in.is_leaf:
        stand_in.grad = None
    return stand_in


def _member(base: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The stand-in of one of several tensors over the storage `base`."""
    view = torch.as_strided(base, real.shape, real.stride(), int(real.storage_offset())).detach()
    if isinstance(real, torch.nn.Parameter):
        view = _compat.as_parameter(view)
    return view.requires_grad_(real.requires_grad)


def _dictionaries_in(value: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries in a nest, which may contain itself."""
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop()
        if isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            pending.extend(each.values() if isinstance(each, dict) else each)
            if isinstance(each, dict):
                yield each


@contextmanager
def _branches_explained(optimizer: Optimizer) -> Iterator[None]:
    """While active, an optimizer whose own code branches on tensor values is refused by name."""
    try:
        yield
    except _compat.data_dependent_errors() as error:
        line = user_line_of(error)
        raise CaptureError(
            f"{type(optimizer).__name__}.step() takes the values of tensors for plain numbers",
            location=None if line is None else str(line),
            hint="use an optimizer that computes with tensors, such as AdamW, Adam, SGD, Adagrad,"
            " RMSprop, NAdam, RAdam, Adamax, Adadelta or Rprop",
        ) from error


@contextmanager
def _autocast_cache(enabled: bool) -> Iterator[None]:
    """Autocast's weight cache, which `make_fx` turns off, as it was: with it, eager casts a weight
    once, and sums its gradients before the cast. Emptied on leaving, so that no traced tensor stays
    in it."""
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
