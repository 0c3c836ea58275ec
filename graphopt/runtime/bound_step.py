"""Run a captured graph as a step: live tensors in, results where they belong."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import is_
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.late import put_gradient, without_torch_function
from graphopt.budget import Cause
from graphopt.errors import AssumptionFailedError, GraphOptError
from graphopt.graph_utils import without_autocast, written
from graphopt.host.assumptions import Answer
from graphopt.host.running import HostRun, running
from graphopt.host.sizes import Sizes, answered_alike, found_before
from graphopt.iter_graph import IterGraphModule
from graphopt.ranks.failed_runs import explained, group_names
from graphopt.ranks.failures import check_usable
from graphopt.runtime.agreed import Agreed
from graphopt.runtime.branch import Begun, Branch, Left
from graphopt.runtime.generators import DrawnGenerators
from graphopt.runtime.late import LateTensors, settle, warn_of_held
from graphopt.runtime.moved_apart import MovedApart, put_back
from graphopt.runtime.results import StepResults
from graphopt.tracing.call import Call
from graphopt.tracing.capture import CapturedStep
from graphopt.tracing.guards import Guards
from graphopt.tracing.inputs import Storage, as_tensor

logger = logging.getLogger("graphopt")


class Tries:
    """How it went when a branch was tried.

    Attributes:
        failures: how many calls one after another have taken another branch.
    """

    def __init__(self) -> None:
        self.failures = 0


class BoundStep:
    """A captured step with the guards under which it holds, ready to be called.

    Args:
        captured: what was captured.
        module: its graph after all passes, finalized.
        guards: when it may be used.
        agreed: what the ranks agreed on for it; None where it does not communicate.
        number: counts the captures of a step.

    Attributes:
        cause: why it was captured besides others; None for the first.
        branch: its graph as it runs.
        groups: names of the process groups that it communicates in.
        answers: to the decisions by value, in the order of the step, that it holds for.
        tries: how it went when its branch was tried.
    """

    def __init__(
        self,
        captured: CapturedStep,
        module: IterGraphModule,
        guards: Guards,
        agreed: Agreed | None,
        number: int,
    ) -> None:
        self.captured = captured
        self.branch = Branch(module)
        self.guards = guards
        self.agreed = agreed
        self.number = number
        self.cause: Cause | None = None
        self.answers = tuple(captured.live.answers)
        self.tries = Tries()
        self._generators = DrawnGenerators(module.graph if self.answers else None)
        inputs = captured.live
        self._holders = inputs.placeholders
        self._replaceable = [
            (index, holder)
            for index, holder in enumerate(self._holders)
            if isinstance(holder, Storage) or holder.rebindable
        ]
        self._tensors: list[Any] = [
            None if isinstance(holder, Storage) else holder.tensor for holder in self._holders
        ]
        dead = {id(inputs.module_tensors[i]) for i in captured.signature.dead_gradients}
        if self.answers:  # a failed step must leave them
            dead = set()
        self._gradients = [(g.owner, id(g.owner) in dead) for g in inputs.gradients]
        self._numbers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._lock = threading.RLock()
        self._running = False
        self.groups = group_names(module.graph)
        self._step = 0
        self._warned, self._collects = False, True
        self._stream: torch.cuda.Stream | None = None
        self._left: Left | None = None
        self._late = _updated_late(module)
        self._apart = MovedApart(captured)
        self._results = StepResults(captured)
        reference = weakref.ref(self)
        self._unsettled = LateTensors(lambda: _finish_unasked(reference))

    @property
    def failures(self) -> int:
        """How many calls one after another have taken another branch."""
        return self.tries.failures

    @property
    def module(self) -> IterGraphModule:
        """The graph, ready to run."""
        return self.branch.module

    def __call__(self, call: Call, step: int, begun: Begun | None = None) -> Any:
        """Run the step.

        Args:
            step: which call of the training step it is, counted from 1.
            begun: what another graph has done of it, from which it goes on.

        Raises:
            CollectiveError: communication with the other ranks failed, or has failed before.
            AssumptionFailedError: the values take another branch. Nothing has changed then.
        """
        with self._lock:  # other threads that use late tensors wait until the step is over
            check_usable(self.groups)
            if self.agreed is not None:
                self.agreed.hear()
            leave = self._may_leave_in_flight()
            with without_torch_function():
                moved = self._apart.move()
                flat = self.values(call)
            settle(flat, besides=self._unsettled)
            state, self.captured.state = self.captured.state, None
            host = self._host_run(flat, step, call)
            self._running = True
            generators, drawn = self._before_drawing(begun)
            branch, there = (begun.branch, begun.there) if begun else (self.branch, [])
            try:
                with torch.no_grad(), without_autocast(), running(host):
                    user, _, carried = branch.run(flat, there, leave)
                host.say()
            except AssumptionFailedError as error:
                put_back(moved)
                self._left = Left(branch, error.index, flat, error.handed_out, generators)
                error.handed_out = ()
                generators.restore(drawn)
                self.captured.state = state
                self.tries.failures += 1
                raise
            except BaseException as error:
                host.put.undo()
                self._raise_explained(error, step, host, branch.module)
                raise
            finally:
                self._running = False
                self._watch_flight()
            self._step, self.tries.failures = step, 0
            with without_torch_function():
                if state is not None:
                    state.put()
                results = [*user, *carried]
                self._apart.leave(moved, results)
                returned = self._results.put(call, flat, results, host.put)
            host.end()
            return returned

    def _before_drawing(self, begun: Begun | None) -> tuple[DrawnGenerators, list[torch.Tensor]]:
        """The generators that a call draws from, and what they are before it; they go on from where
        what has begun has left them."""
        if begun is None:
            return self._generators, self._generators.states()
        generators = self._generators.joined(begun.left.generators)
        before = generators.states()
        begun.left.generators.restore(begun.left.drawn)
        return generators, before

    def take_left(self) -> Left:
        """What the last call has left behind, in which an assumption failed."""
        left, self._left = self._left, None
        assert left is not None
        return left

    def goes_on(self, answers: Sequence[Answer]) -> bool:
        """Whether it holds for a call whose first decisions have these answers."""
        return not answers or answered_alike(self.module.graph, self.answers, answers)

    def answers_before(self, index: int) -> tuple[Answer, ...]:
        """To the first decisions of the last call, which came to a decision that failed."""
        if not any(isinstance(answer, Sizes) for answer in self.answers):
            return self.answers[:index]
        found = found_before(self.module.graph, index)
        return tuple(found.get(i, answer) for i, answer in enumerate(self.answers[:index]))

    def _host_run(self, flat: list[Any], step: int, call: Call) -> HostRun:
        rank = _compat.rank_among_several()
        votes, agreement = (
            (self.agreed.votes, self.agreed.agreement) if self.agreed else (None,) * 2
        )
        mixed = call.drawn.are_mixed
        return HostRun(lambda: self._storages(flat), rank, step, votes, agreement, mixed)

    def _storages(self, flat: list[Any]) -> frozenset[int]:
        """The storages among `flat` that the step may be updating."""
        inputs = self.captured.live
        others = len(inputs.hyperparameters) + len(inputs.user) + len(inputs.drawn.inputs)
        state = flat[: len(flat) - others]
        return frozenset(map(_compat.storage_key, filter(_is_tensor, state)))

    def _may_leave_in_flight(self) -> bool:
        """Whether all uses of what this call would update late can be seen; they are from now on,
        until it is updated."""
        if not self._late:
            return True
        if self.answers:  # another graph may have to run in this call
            return False
        names, tensors = zip(*self._late_tensors(), strict=True)
        if self.module.in_flight:
            if all(map(is_, tensors, self._unsettled.tensors)):
                return True
            self.flush()  # other tensors have taken their place
        held = self._unsettled.arm(tensors)
        if held is not None and self._collects:
            gc.collect()  # capturing has left garbage, which holds what it has looked at
            held = self._unsettled.arm(tensors)
        self._collects = False
        if held is None:
            return True
        if not self._warned:
            warn_of_held(names[held], self._consequence())
        self._warned = True
        if self.module.flush_communicates:
            self._unsettled.arm(tensors, anyway=True)
        return self.module.flush_communicates

    def _late_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are updated late, with their names."""
        holders, states = self._holders, self.guards.states
        for index in self._late:
            if index >= len(holders):
                state = index - len(holders)
                yield self.captured.live.states[state].fqn, states[state]
                continue
            holder = holders[index]
            members = holder.members if isinstance(holder, Storage) else [holder]
            yield from ((member.fqn, member.live()) for member in members)

    def _consequence(self) -> str:
        if self.module.flush_communicates:
            return "it is late until the next call, or flush() on every rank"
        return "it is updated in its own step, and no update overlaps with the next one"

    def _raise_explained(
        self,
        error: BaseException,
        step: int,
        host: HostRun | None = None,
        module: IterGraphModule | None = None,
    ) -> None:
        module = module or self.module
        failure = explained(module, error, step, host) if self.groups else None
        if failure is not None:
            raise failure from error

    def _watch_flight(self) -> None:
        self._stream = _stream_of(self._unsettled.tensors)
        if not self.module.in_flight:
            self._unsettled.disarm()
        elif not self._unsettled.armed:  # an update failed: whoever uses its tensors is told
            self._unsettled.arm([tensor for _, tensor in self._late_tensors()], anyway=True)

    def flush(self) -> None:
        """Do late work that is in flight.

        Raises:
            GraphOptError: a call failed in the middle of an update.
        """
        with self._lock:
            if self._running:  # a signal handler or hook reads state in the middle of a step
                return
            self._running = True
            try:
                if self.module.in_flight:
                    with (
                        _compat.without_modes(),  # leaving inference mode turns grad mode on
                        torch.no_grad(),
                        without_autocast(),
                        _on(self._stream),
                    ):
                        self.module.flush()
            except BaseException as error:
                self._raise_explained(error, self._step + 1)
                raise
            finally:
                self._running = False
                if not self.module.in_flight:
                    self._unsettled.disarm()

    @property
    def needs_all_ranks(self) -> bool:
        """Whether late work is in flight that launches collectives."""
        return self.module.in_flight and self.module.flush_communicates

    def close(self) -> None:
        """Do late work that is in flight, or drop it where that is impossible."""
        if self.module.resumable and not self.needs_all_ranks:
            self.flush()
            return
        logger.error("late work of a training step is dropped: its last update is lost")
        self.drop()

    def drop(self) -> None:
        """Forget late work that is in flight."""
        self.module.drop_flight()
        self._unsettled.disarm()

    def finish_unasked(self) -> bool:
        """Flush because somebody reads state, which must not wait for other ranks.

        Returns:
            Whether nothing is in flight any more; not so where the reader is within the step.
        """
        if self.needs_all_ranks and not self._running:
            raise GraphOptError(
                "parameters or optimizer state are read while a collective of the last step is"
                " still to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()
        return not self.module.in_flight

    def values(self, call: Call) -> list[Any]:
        """The inputs of the graph as they are now, in order."""
        inputs = self.captured.live
        flat = [*self._tensors, *self.guards.states]
        for index, holder in self._replaceable:
            flat[index] = holder.base() if isinstance(holder, Storage) else holder.live()
        flat = self._unsettled.own(flat)
        for owner, dead in self._gradients:
            parameter = owner.live()
            flat.append(None if dead else parameter.grad)
            if dead:
                put_gradient(parameter, None)
        flat.extend(call.leaves[position].grad for position in inputs.argument_gradients)
        numbers = self.guards.numbers_of(call)
        flat.extend(map(self._as_tensor, count(), numbers))
        flat.extend(call.leaves[position] for position in inputs.user)
        flat.extend(inputs.drawn.tensors(call.drawn.of(inputs.drawn, numbers)))
        return flat

    def _as_tensor(self, index: int, value: Any) -> torch.Tensor:
        """A hyperparameter as a tensor: that of the last call, if nobody has written to it."""
        known, tensor = self._numbers.get(index, (None, None))
        if tensor is None or known is not value or _compat.may_be_written(tensor):
            tensor = as_tensor(value)
            self._numbers[index] = value, tensor
        return tensor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _finish_unasked(reference: weakref.ref[BoundStep]) -> bool:
    step = reference()
    return step is None or step.finish_unasked()


def _updated_late(module: IterGraphModule) -> list[int]:
    """The placeholders of the graph that late nodes update, by position."""
    late = {state for node in module.graph.late for state in written(node)}
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    return [index for index, node in enumerate(placeholders) if node in late]


def _stream_of(tensors: Sequence[torch.Tensor]) -> torch.cuda.Stream | None:
    """The CUDA stream on which a step has just run; None on other devices."""
    device = tensors[0].device if tensors else None
    return (
        torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
    )


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on the stream of the step, whose kernels may still read what is updated; the stream of
    whoever asked for it waits for that."""
    if stream is None:
        yield
        return
    asking = torch.cuda.current_stream(stream.device)
    with torch.cuda.stream(stream):
        yield
    asking.wait_stream(stream)
