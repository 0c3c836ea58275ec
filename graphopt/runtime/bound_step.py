"""Execution of a captured graph as a step: live tensors in, results where they belong."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from graphopt import _compat
from graphopt._compat.tensor_classes import without_torch_function
from graphopt.branches.branch import Branch, ResumedCall, ResumePoint
from graphopt.branches.drawn_generators import DrawnStates, drawn_generators
from graphopt.branches.sent_collectives import CollectiveResults, SentBefore
from graphopt.errors import AssumptionFailedError, GraphOptError
from graphopt.graph_utils import without_autocast
from graphopt.guards.guards import Guards
from graphopt.host.decisions.assumptions import Answer, uniform_answers
from graphopt.host.decisions.sizes import Sizes, answered_alike, found_before
from graphopt.host.decisions.used import UsedParameters, unused
from graphopt.host.running import CallbackRun, running
from graphopt.iter_graph import IterGraphModule
from graphopt.ranks.failed_runs import explained, group_names, sending_explained
from graphopt.ranks.failure_reports import check_usable, withdraw
from graphopt.ranks.joining_with_zeros import join_with_zeros, launches_before_decisions
from graphopt.runtime.agreement.agreed import RankAgreement
from graphopt.runtime.input_values import InputValues
from graphopt.runtime.late.tensors import settle
from graphopt.runtime.late.updates import LateUpdates
from graphopt.runtime.recaptures import RecaptureCause
from graphopt.runtime.results import StepResults
from graphopt.runtime.separated_storages import SeparatedStorages, put_back
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep

logger = logging.getLogger("graphopt")


class BranchFailures:
    """The recent failures of a branch's graphs.

    Attributes:
        failures: the number of consecutive calls that have taken another branch.
    """

    def __init__(self) -> None:
        self.failures = 0


class BoundStep:
    """A callable captured step, with the guards under which it holds.

    Args:
        captured: the captured step, with its graph after all passes, finalized.
        guards: the conditions under which it may be used.
        agreed: the ranks' agreement on the graph; None without communication.
        cause: the reason why it was captured besides others; None for the first.
        number: counts the captures of a step.

    Attributes:
        branch: its graph as it runs.
        groups: names of the process groups that it communicates in.
        apart: those of them whose other ranks go on where a call begins once more.
        answers: to the decisions by value, in the order of the step, that it holds for.
        uniform: those of them that all ranks have alike.
        tries: the recent failures of its branch.
    """

    def __init__(
        self,
        captured: CapturedStep,
        guards: Guards,
        agreed: RankAgreement | None,
        cause: RecaptureCause | None,
        number: int,
    ) -> None:
        module = captured.graph_module
        assert isinstance(module, IterGraphModule)
        self.captured, self.branch = captured, Branch(module)
        self.guards, self.agreed = guards, agreed
        self.cause, self.number = cause, number
        self.answers = tuple(captured.live.answers)
        self.uniform = uniform_answers(module.graph)
        self.tries = BranchFailures()
        self._generators = drawn_generators(module.graph) if self.answers else []
        self._inputs = InputValues(captured, guards)
        self._lock = threading.RLock()
        self._running = False
        self.groups = group_names(module.graph)
        self.apart = captured.apart
        self._notes_launches = launches_before_decisions(module.graph, self.apart)
        self._step = 0
        self._unused = unused(module.graph)
        self._left: ResumePoint | None = None
        self._moved = SeparatedStorages(captured)
        self._results = StepResults(captured)
        finish = weakref.WeakMethod(self._finish_unasked)
        self._late = LateUpdates(
            captured, module, guards, lambda: (asked := finish()) is None or asked()
        )

    @property
    def module(self) -> IterGraphModule:
        """The step's graph, ready to run."""
        return self.branch.module

    def __call__(
        self,
        call: Call,
        step: int,
        begun: ResumedCall | None = None,
        sent: SentBefore | None = None,
    ) -> Any:
        """Runs the step's graph on a call's arguments.

        Args:
            step: the number of the training step's call, counted from 1.
            begun: the work of another graph in this call, from which the graph continues.
            sent: what the collectives of another graph have given in it, where other ranks have
                gone on.

        Raises:
            CollectiveError: communication with the other ranks failed, or has failed before.
            AssumptionFailedError: the values take another branch. Nothing has changed then.
        """
        with self._lock:  # other threads that use late tensors wait until the step is over
            self._hear()
            leave = self._late.may_be_left(self.flush)
            with without_torch_function():
                moved = self._moved.move()
                flat = self.values(call)
            settle(flat, besides=self._late)
            state, self.captured.state = self.captured.state, None
            host = self._host_run(flat, step, call)
            self._running = True
            drawn = self._before_drawing(begun)
            notes = sent or self._unused or self._notes_launches
            noting = CollectiveResults(sent or {}) if notes else nullcontext()
            branch, there = (begun.branch, begun.there) if begun else (self.branch, [])
            try:
                with torch.no_grad(), without_autocast(), running(host), noting:
                    user, _, carried = branch.run(flat, there, leave)
                host.say()
            except AssumptionFailedError as error:
                put_back(moved)
                now = DrawnStates(drawn.generators)
                self._left = ResumePoint(branch, error.index, flat, error.handed_out, now)
                self._note_failure(error, noting)
                drawn.restore()
                self.captured.state = state
                raise
            except BaseException as error:
                self._raise_explained(error, step, host, branch.module)
                raise
            finally:
                self._running = False
                self._late.watch()
            self._step, self.tries.failures = step, 0
            if self.agreed is not None:
                self.agreed.unused.over()
            with without_torch_function():
                if state is not None:
                    state.put()
                results = [*user, *carried]
                self._moved.leave(moved, results)
                returned = self._results.put(call, flat, results)
            host.end()
            return returned

    def _hear(self) -> None:
        """Begins a call: hears of failed ranks, and tells the others which parameters it uses."""
        check_usable(self.groups)
        if self.agreed is not None:
            self.agreed.hear()
            self.agreed.unused.say(self._unused)

    def _note_failure(self, error: AssumptionFailedError, noting: object) -> None:
        """Keeps the results of the call's collectives after an assumption failed."""
        if isinstance(noting, CollectiveResults) and (error.alone or self.apart):
            assert self._left is not None
            self._left.sent = noting.results(None if error.alone else self.apart)
        error.handed_out = ()
        if not error.alone:
            self.tries.failures += 1

    def values(self, call: Call) -> list[Any]:
        """The current inputs of the graph, in order."""
        return self._late.own(self._inputs.of_state()) + self._inputs.of_call(call)

    def _before_drawing(self, begun: ResumedCall | None) -> DrawnStates:
        """The generators that the call draws from, as they were before it."""
        if begun is None:
            return DrawnStates(self._generators)
        before = DrawnStates([*self._generators, *begun.left.drawn.generators])
        begun.left.drawn.restore()
        return before

    def leave(self, step: int, sent: SentBefore, number: int | None = None) -> int | None:
        """Leaves a call whose graph the other ranks run, and joins their collectives until they
        learn of it.

        Args:
            sent: what has been sent in it.
            number: of what the ranks agreed on for the graph that this rank has instead, 0 where it
                has none; None where it has failed.

        Returns:
            As of `RankVotes.end`: how all ranks begin the call once more; None where they do not.
        """
        agreed = self.agreed
        if agreed is None or agreed.questions is None or not agreed.agreement.alone:
            return None
        group = agreed.unused.group
        with sending_explained(group, step, "collective", "zeros, as this rank leaves the call,"):
            join_with_zeros(self.module.first_executable, self.groups, sent)
        found = agreed.questions.end(step, None if self.apart else number)
        if found is not None:
            withdraw(group)
        return found

    def take_left(self) -> ResumePoint:
        """The values that the last call computed before an assumption failed."""
        left, self._left = self._left, None
        assert left is not None
        return left

    def goes_on(self, answers: Sequence[Answer]) -> bool:
        """True if the graph's first decisions have these outcomes."""
        return not answers or answered_alike(self.module.graph, self.answers, answers)

    def decides_no_more(self, index: int) -> bool:
        """True if no decision follows this one in the graph, apart from those on what other
        ranks use."""
        return all(isinstance(answer, UsedParameters) for answer in self.answers[index + 1 :])

    def answers_before(self, index: int) -> tuple[Answer, ...]:
        """The outcomes of the last call's decisions before the one that failed."""
        if not any(isinstance(answer, Sizes) for answer in self.answers):
            return self.answers[:index]
        found = found_before(self.module.graph, index)
        return tuple(found.get(i, answer) for i, answer in enumerate(self.answers[:index]))

    def _host_run(self, flat: list[Any], step: int, call: Call) -> CallbackRun:
        rank = _compat.rank_among_several()
        storages = partial(self._inputs.updated_storages, flat)
        return CallbackRun(storages, rank, step, self.agreed, call.given)

    def _raise_explained(
        self,
        error: BaseException,
        step: int,
        host: CallbackRun | None = None,
        module: IterGraphModule | None = None,
    ) -> None:
        module = module or self.module
        failure = explained(module, error, step, host) if self.groups else None
        if failure is not None:
            raise failure from error

    def flush(self) -> None:
        """Runs late work that is in flight.

        Raises:
            GraphOptError: a call failed in the middle of an update.
        """
        with self._lock:
            if self._running:  # a signal handler or hook reads state in the middle of a step
                return
            self._running = True
            try:
                self._late.run()
            except BaseException as error:
                self._raise_explained(error, self._step + 1)
                raise
            finally:
                self._running = False

    @property
    def needs_all_ranks(self) -> bool:
        """True if late work in flight launches collectives."""
        return self.module.in_flight and self.module.flush_communicates

    def close(self) -> None:
        """Runs late work that is in flight, or drops it if that is impossible."""
        if self.module.resumable and not self.needs_all_ranks:
            self.flush()
            return
        logger.error("late work of a training step is dropped: its last update is lost")
        self.drop()

    def drop(self) -> None:
        """Drops late work that is in flight."""
        self._late.drop()

    def _finish_unasked(self) -> bool:
        """Flushes when somebody reads state, without waiting for other ranks.

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
