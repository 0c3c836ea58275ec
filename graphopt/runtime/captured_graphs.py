"""The captured graphs of a training step, and the lookup of the one that holds for a call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from graphopt.errors import GraphOptError
from graphopt.runtime.recaptures import MODE, RecaptureCause, dropped

if TYPE_CHECKING:
    from graphopt.runtime.bound_step import BoundStep, BranchFailures
    from graphopt.tracing.call import Call


class CapturedGraphs(Sequence["BoundStep"]):
    """The captured graphs of one step, most recently used first.

    Args:
        name: the name of the step, for messages.
        most: the number of graphs that are kept.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._entries: list[BoundStep] = []

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> BoundStep: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[BoundStep]: ...

    def __getitem__(self, index: int | slice) -> BoundStep | Sequence[BoundStep]:
        return self._entries[index]

    def __iter__(self) -> Iterator[BoundStep]:
        return iter(self._entries)

    def known(
        self, call: Call, mode: tuple[Any, ...], retried: BranchFailures | None
    ) -> BoundStep | None:
        """The graph that holds for a call, which becomes the most recently used.

        Args:
            mode: the call's mode of communication.
            retried: the history of the branch that is tried before all others.
        """
        from graphopt.branches.sharing import in_order

        for entry in in_order(self._entries, retried):
            bound = call.using(entry.captured.besides)
            if bound is None or not _goes_on(entry, call) or not _fits(entry, bound, mode):
                continue
            if entry is not self._entries[0]:
                self.land()
                self._entries.remove(entry)
                self._entries.insert(0, entry)
            return entry
        return None

    def add(self, entry: BoundStep) -> None:
        """Adds a new graph as the most recently used."""
        from graphopt.branches.sharing import join_branch

        join_branch(entry, self._entries)
        self._entries.insert(0, entry)
        self.drop_unusable()

    def state_made(self, by: BoundStep) -> None:
        """Marks optimizer state as created by the graph `by`: no other graph creates it."""
        for entry in self._entries:
            if entry is not by:
                entry.captured.state = None

    def make_room(self, cause: RecaptureCause | None) -> None:
        """Drops a graph if the budget is exhausted.

        Args:
            cause: the reason why another graph is needed.

        Raises:
            CaptureError: shapes or values have used up what may be kept.
        """
        causes = [entry.cause for entry in self._entries]
        position = dropped(causes, cause, self._most, self._name)
        if position is not None:
            self._entries.pop(position).close()

    def with_counted(self, call: Call, cause: RecaptureCause | None) -> Call:
        """The call, with counters that the step is known to change as inputs.

        Args:
            cause: the reason why another graph is needed for it.
        """
        from graphopt.tracing.inputs.found_places import changing
        from graphopt.tracing.inputs.remembered import remembered
        from graphopt.tracing.outside.places import MISSING

        found = changing(entry.captured.found for entry in self._entries)
        known = [entry.captured.besides for entry in self._entries]
        listed = {(each.place.identity, each.counted) for each in found.carried}
        for each in chain.from_iterable(besides.carried for besides in known):
            if (each.place.identity, each.counted) not in listed:
                listed.add((each.place.identity, each.counted))
                found.carried.append(each)
        if cause is not None and cause.kind != MODE and self._entries:
            found.carried += self._entries[0].guards.counted_for(call)
        # What is in objects that are taken apart is an argument already.
        found.carried = [
            each
            for each in found.carried
            if each.place.now() is not MISSING and not call.objects.contains(each.place.holder)
        ]
        call = copy.copy(call.using(call.besides.joined(found)) or call)
        call.earlier = remembered((e.captured.besides, e.captured.live) for e in self._entries)
        return call

    def drop_unusable(self) -> None:
        """Drops graphs whose models are gone or whose agreement has ended."""
        for entry in self._entries:
            if not _is_usable(entry) and entry.module.in_flight:
                entry.close()  # a layer or another model may live on
        self._entries = list(filter(_is_usable, self._entries))

    def forget_waiting(self) -> None:
        """Drops graphs that wait for state of a first call that created none."""
        self._entries = [entry for entry in self._entries if not entry.captured.state]

    def land(self) -> None:
        """Finishes updates in flight before another graph runs; raises if all ranks must."""
        if any(entry.needs_all_ranks for entry in self._entries):
            raise GraphOptError(
                "another graph is needed for this call while a collective of the last step is still"
                " to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()

    def flush(self) -> None:
        """Runs all late work that is in flight."""
        for entry in self._entries:
            entry.flush()

    def close(self) -> None:
        """Runs late work that is in flight, or drops it if that is impossible."""
        for entry in self._entries:
            if entry.module.in_flight:
                entry.close()

    def finish(self) -> None:
        """Runs late work, or drops that of a call that failed during an update."""
        for entry in self._entries:
            if entry.module.resumable:
                entry.flush()
            else:
                entry.drop()

    def forget(self) -> None:
        """Drops all captured graphs."""
        self._entries = []


def _is_usable(entry: BoundStep) -> bool:
    """True if a graph's models exist and the ranks still agree on its collectives."""
    return entry.guards.may_fit() and (entry.agreed is None or entry.agreed.current)


def _goes_on(entry: BoundStep, call: Call) -> bool:
    """True if a graph takes the call's decisions; where there are none yet, those that all ranks
    try first. A rank that has no such graph makes one, also where it has one of another branch."""
    if not call.decided and entry.agreed is not None:
        return entry.uniform == entry.agreed.likely
    return entry.goes_on(call.decided)


def _fits(entry: BoundStep, call: Call, mode: tuple[Any, ...]) -> bool:
    from graphopt._compat.tensor_classes import without_torch_function

    with without_torch_function():  # to look at a tensor's kind is no use of it
        return entry.guards.fit(call, mode)
