"""The captured graphs of a training step, and the lookup of the one that holds for a call."""

from __future__ import annotations

import copy
import logging
from collections import UserList
from itertools import chain
from typing import Any

from graphopt._compat.tensor_classes import without_torch_function
from graphopt.branches.sharing import in_order, join_branch
from graphopt.errors import GraphOptError
from graphopt.guards.guards import Guards
from graphopt.host import share_counts
from graphopt.host.counts import TimesReached
from graphopt.runtime.agreement.agreed import RankAgreement
from graphopt.runtime.bound_step import BoundStep, BranchFailures
from graphopt.runtime.late.tensors import warn_of_held
from graphopt.runtime.recaptures import MODE, SHAPE, RecaptureCause, dropped
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.found_places import changing
from graphopt.tracing.inputs.implicit import CarriedPlace, ImplicitInputs
from graphopt.tracing.inputs.remembered import remembered
from graphopt.tracing.outside.places import MISSING

logger = logging.getLogger("graphopt")

_SHAPES_BEFORE_ADVICE = 8


class CapturedGraphs(UserList[BoundStep]):
    """The captured graphs of one step, most recently used first; they share one count of callbacks.

    Args:
        name: the name of the step, for messages.
        most: the number of graphs that are kept.
    """

    def __init__(self, name: str, most: int) -> None:
        super().__init__()
        self._name, self._most = name, most
        self._counts = TimesReached()
        self._held: frozenset[str] = frozenset()
        """The names of the tensors that a warning has said to be held elsewhere."""
        self._for_shapes = 0
        """The number of captures for other shapes."""

    def known(
        self, call: Call, mode: tuple[Any, ...], retried: BranchFailures | None
    ) -> BoundStep | None:
        """The graph that holds for a call, which becomes the most recently used.

        Args:
            mode: the call's mode of communication.
            retried: the history of the branch that is tried before all others.
        """
        for entry in in_order(self.data, retried):
            bound = call.using(entry.captured.besides)
            if bound is None or not _goes_on(entry, call) or not _fits(entry, bound, mode):
                continue
            if entry is not self.data[0]:
                self.land()
                self.remove(entry)
                self.insert(0, entry)
            return entry
        return None

    def cause(
        self, call: Call, mode: tuple[Any, ...], branch: RecaptureCause | None
    ) -> RecaptureCause | None:
        """Logs why a call needs another graph, and returns the cause if the step was captured
        before.

        Args:
            mode: the call's mode of communication.
            branch: the decision that goes another way than in all graphs, where that is why.
        """
        if branch is not None:
            logger.info("capturing %s again: %s: %s", self._name, branch.name, branch.said)
            return branch
        if not self.data:
            logger.info("capturing %s", self._name)
            return None
        guards = [entry.guards for entry in self.data]
        near = (each for each in guards if _is_near(each, call, mode))
        found = list(RecaptureCause.of_call(call, mode, next(near, guards[0])))
        logger.info("capturing %s again: %s", self._name, "; ".join(each.said for each in found))
        cause = found[0] if found else RecaptureCause(MODE, "", "")
        self._for_shapes += cause.kind == SHAPE
        if cause.kind == SHAPE and self._for_shapes == _SHAPES_BEFORE_ADVICE:
            logger.warning(
                "%s was captured again for new shapes %d times, each for itself: pad the"
                " batch, or sort it into buckets of a few lengths (the last change: %s)",
                *(self._name, _SHAPES_BEFORE_ADVICE, cause.said),
            )
        return cause

    def bind(
        self,
        call: Call,
        mode: tuple[Any, ...],
        captured: CapturedStep,
        agreed: RankAgreement | None,
        cause: RecaptureCause | None,
        number: int,
    ) -> BoundStep:
        """Makes a captured call callable, and adds it as the most recently used graph.

        Args:
            mode: the call's mode of communication.
            agreed: the ranks' agreement on the graph; None without communication.
            cause: the reason why it was captured besides others; None for the first.
            number: counts the captures of the step.
        """
        share_counts(captured.graph_module.graph, self._counts)
        with captured.state_present():
            guards = Guards(call, captured.live, mode, captured.signature, captured.outside)
        if agreed is not None:
            agreed.guards = guards
            self._warn_of_held(captured.live.held)
        entry = BoundStep(captured, guards, agreed, cause, number)
        join_branch(entry, self.data)
        self.insert(0, entry)
        self.drop_unusable()
        return entry

    def _warn_of_held(self, held: frozenset[str]) -> None:
        if new := held - self._held:
            self._held |= new
            names = ", ".join(sorted(new))
            warn_of_held(names, "its update stays in its own step until reset() of this step")

    def state_made(self, by: BoundStep) -> None:
        """Marks optimizer state as created by the graph `by`: no other graph creates it."""
        for entry in self.data:
            if entry is not by:
                entry.captured.state = None

    def make_room(self, cause: RecaptureCause | None) -> None:
        """Drops a graph if the budget is exhausted.

        Args:
            cause: the reason why another graph is needed.

        Raises:
            CaptureError: shapes or values have used up what may be kept.
        """
        causes = [entry.cause for entry in self.data]
        position = dropped(causes, cause, self._most, self._name)
        if position is not None:
            self.pop(position).close()

    def with_counted(self, call: Call, cause: RecaptureCause | None) -> Call:
        """The call, with counters that the step is known to change as inputs.

        Args:
            cause: the reason why another graph is needed for it.
        """
        found = changing(entry.captured.found for entry in self.data).carried
        known = (entry.captured.besides.carried for entry in self.data)
        carried: dict[tuple[Any, bool], CarriedPlace] = {}
        for each in chain(found, *known):
            carried.setdefault((each.place.identity, each.counted), each)
        counted = list(carried.values())
        if cause is not None and cause.kind != MODE and self.data:
            counted += self.data[0].guards.counted_for(call)
        # What is in objects that are taken apart is an argument already.
        counted = [
            each
            for each in counted
            if each.place.now() is not MISSING and not call.objects.contains(each.place.holder)
        ]
        more = call.besides.joined(ImplicitInputs(carried=counted))
        call = copy.copy(call.using(more) or call)
        call.earlier = remembered((e.captured.besides, e.captured.live) for e in self.data)
        return call

    def drop_unusable(self) -> None:
        """Drops graphs whose models are gone or whose agreement has ended."""
        for entry in self.data:
            if not _is_usable(entry) and entry.module.in_flight:
                entry.close()  # a layer or another model may live on
        self.data = list(filter(_is_usable, self.data))

    def forget_waiting(self) -> None:
        """Drops graphs that wait for state of a first call that created none."""
        self.data = [entry for entry in self.data if not entry.captured.state]

    def land(self) -> None:
        """Finishes updates in flight before another graph runs; raises if all ranks must."""
        if any(entry.needs_all_ranks for entry in self.data):
            raise GraphOptError(
                "another graph is needed for this call while a collective of the last step is still"
                " to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()

    def flush(self) -> None:
        """Runs all late work that is in flight."""
        for entry in self.data:
            entry.flush()

    def close(self) -> None:
        """Runs late work that is in flight, or drops it if that is impossible."""
        for entry in self.data:
            if entry.module.in_flight:
                entry.close()

    def finish(self) -> None:
        """Runs late work, or drops that of a call that failed during an update; then forgets all
        graphs, and which warnings have been given."""
        for entry in self.data:
            if entry.module.resumable:
                entry.flush()
            else:
                entry.drop()
        self.data, self._held, self._for_shapes = [], frozenset(), 0


def _is_usable(entry: BoundStep) -> bool:
    """True if a graph's models exist and the ranks still agree on its collectives."""
    return entry.guards.may_fit() and (entry.agreed is None or entry.agreed.current)


def _goes_on(entry: BoundStep, call: Call) -> bool:
    """True if a graph takes the call's decisions; where there are none yet, those that all ranks
    try first. A rank that has no such graph makes one, also where it has one of another branch."""
    if not call.decided and entry.agreed is not None:
        return entry.uniform == entry.agreed.likely
    return entry.goes_on(call.decided)


def _is_near(guards: Guards, call: Call, mode: tuple[Any, ...]) -> bool:
    """True if a graph's argument shapes are those of a call, so that they caused no capture."""
    return guards.structure_mismatch(call, mode) is None and guards.shape_mismatch(call) is None


def _fits(entry: BoundStep, call: Call, mode: tuple[Any, ...]) -> bool:
    with without_torch_function():  # to look at a tensor's kind is no use of it
        return entry.guards.fit(call, mode)
