"""Dispatch of a step's calls: to the graph that holds, or to a new capture.

find the graph, else capture it  ──▶  run it  ──▶  where an assumption fails: the other branch
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from graphopt import _compat
from graphopt._compat.threads import no_trace_elsewhere
from graphopt.branches.branch import ResumedCall
from graphopt.branches.sent_collectives import SentBefore
from graphopt.errors import AssumptionFailedError, CaptureError
from graphopt.parallel import Parallel
from graphopt.runtime.agreement.agreed import NotAsAgreedError, OneVote, OtherRanks
from graphopt.runtime.agreement.communication import Communication
from graphopt.runtime.bound_step import BoundStep, BranchFailures
from graphopt.runtime.captured_graphs import CapturedGraphs
from graphopt.runtime.eager import Fallback
from graphopt.runtime.memory import keep_memory_of
from graphopt.runtime.recaptures import RecaptureCause
from graphopt.stages.compiling import Stages
from graphopt.stages.other_branch import OtherBranch, graph_of_all
from graphopt.tracing.call import Call
from graphopt.tracing.rollback.generators import undisturbed


class Calls:
    """Runs the calls of one step.

    Args:
        fn: the step.
        name: its name, for messages.
        parallel, fallback, max_graphs: as of `graphopt.compile`.

    Attributes:
        number: the number of the running call.
        captured: the number of graphs captured so far.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        stages: Stages,
        parallel: Parallel | None,
        fallback: str | None,
        max_graphs: int,
    ) -> None:
        self._fn, self.stages, self.entries = fn, stages, CapturedGraphs(name, max_graphs)
        self.communication = Communication(fn, parallel)
        self.fallback = Fallback(name, fallback, self.communication)
        self.number = self.captured = 0
        self.turns = 0
        """The number of branches that the call under way has left."""
        self._retried: BranchFailures | None = None

    def reset(self) -> None:
        """Drops everything learned from former calls."""
        self.entries.finish()
        self.fallback.forget()
        self.stages = self.stages.anew()
        self.captured = 0
        self.communication.forget()
        self._retried = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the next call, and returns what the step returns."""
        call = Call(self._fn, args, kwargs)
        self.number += 1
        self.turns = 0
        if self.fallback.active or self._is_watched():
            return self.fallback.run(call, self.number)
        try:
            with _compat.named_in_profile("graphopt.step"):
                entry = self._found_or_captured(call)
                if entry is None:
                    return self.fallback.run(call, self.number)
                return self.run_graph(entry, call)
        except BaseException:
            self.entries.forget_waiting()
            raise

    def _is_watched(self) -> bool:
        """True if a call runs eagerly because a mode or hook must see the functions that it
        calls. Several ranks refuse this: the others run their graphs meanwhile."""
        watching = _compat.watches_functions()
        if watching is None or _compat.rank_among_several() is not None:
            return False
        self.entries.flush()
        self.fallback.warn_of(watching.what)
        return True

    def _found_or_captured(self, call: Call) -> BoundStep | None:
        """The graph that holds for a call, captured if there is none; None if the step runs
        eagerly."""
        entry = self.known(call)
        if entry is None and self.communication.sharded_models is not None:
            self.entries.land()
            entry = self.known(call) if self.communication.shard(call) else None
        if entry is None:
            self.entries.land()
            entry = self._captured_at_begin(call)
        elif entry.agreed is not None and not entry.agreed.holds_for_all(self.number):
            self.entries.land()
            entry = self.captured_or_refused(call, None, OtherRanks(anew=True))
        return entry

    def _captured_at_begin(self, call: Call) -> BoundStep | None:
        """Captures a call for which this rank has no graph, though other ranks may have one. If
        it cannot join their collectives, it leaves the call."""
        joint, mode = self.communication.joint, self.communication.mode()
        questions = joint.asking(call, mode)
        vote = None if questions is None else OneVote(questions, self.number)
        elsewhere = [] if vote else joint.run_elsewhere(call, mode)
        alike = (e for e in self.entries if any(e.agreed is agreed for agreed in elsewhere))
        entry = next(alike, None)
        if entry is None:
            return self.captured_or_refused(call, None, OtherRanks(vote=vote))
        try:
            return self.captured_or_refused(call, None, OtherRanks(alone=True, agreed=entry.agreed))
        except BaseException as error:
            return graph_of_all(self, entry, call, None, {}, error)

    def known(self, call: Call) -> BoundStep | None:
        """The graph that holds for a call; the branch of the last call is tried first."""
        retried, self._retried = self._retried, None
        entry = self.entries.known(call, self.communication.mode(), retried)
        if entry is not None or not self.entries:
            return entry
        with no_trace_elsewhere():  # which replaces functions that the guards compare
            return self.entries.known(call, self.communication.mode(), retried)

    def run_graph(
        self,
        entry: BoundStep,
        call: Call,
        begun: ResumedCall | None = None,
        sent: SentBefore | None = None,
    ) -> Any:
        """Runs a graph, or another branch's graph if an assumption fails."""
        call = call.using(entry.captured.besides) or call
        try:
            result = entry(call, self.number, begun, sent)
        except AssumptionFailedError as error:
            failed = error.with_traceback(None)  # whose frames hold all that was computed
        else:
            self.entries.state_made(entry)
            return result
        result = OtherBranch(self, entry, call, failed).run()
        if not failed.alone:
            self._retried = entry.tries if entry.tries.failures == 1 else None
        return result

    def captured_or_refused(
        self, call: Call, branch: RecaptureCause | None, others: OtherRanks
    ) -> BoundStep | None:
        """Captures a call, or returns None if it cannot be captured and the step runs eagerly.

        Args:
            branch: the decision that goes another way than before, where that is why.
            others: the state of the other ranks meanwhile.
        """
        communication = self.communication
        with communication.failures_told(self.number) as parallel:
            try:
                return self._capture(call, branch, others)
            except BaseException as error:
                alone = communication.joint.alone or others.launched
                if not self.fallback.take(error, call, parallel, alone):
                    raise
            self.entries.clear()
            return None

    def _capture(self, call: Call, branch: RecaptureCause | None, others: OtherRanks) -> BoundStep:
        """Captures a call, runs all stages on it, and keeps the graph."""
        mode = self.communication.mode()
        cause = self.entries.cause(call, mode, branch)
        call = self.entries.with_counted(call, cause)
        ways = self.communication.ways(call, mode, others)
        try:
            self.entries.make_room(cause)
        except CaptureError:
            for ranks in ways:  # which tell ranks that have come to agree
                with suppress(NotAsAgreedError), ranks:
                    raise
        with undisturbed(), self.communication.shards_admitted():
            captured, agreed = self.stages.compile(call, ways)
        call = call.using(captured.besides) or call
        keep_memory_of(captured.graph_module.graph)
        self.captured += 1
        entry = self.entries.bind(call, mode, captured, agreed, cause, self.captured)
        for position in call.modules:
            end = weakref.finalize(call.leaves[position], _forget_dead, weakref.ref(self))
            end.atexit = False
        return entry


def _forget_dead(reference: weakref.ref[Calls]) -> None:
    """Drops the graphs of a model that has just been freed, which hold its parameters."""
    calls = reference()
    if calls is not None:
        calls.entries.drop_unusable()
        calls.communication.joint.forget_dead()
