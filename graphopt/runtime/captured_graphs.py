"""The captured graphs of a training step: which one holds for a call, and how many are kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

from graphopt.errors import GraphOptError
from graphopt.runtime.budget import MODE, Cause, dropped

if TYPE_CHECKING:
    from graphopt.runtime.bound_step import BoundStep, Tries
    from graphopt.tracing.call import Call


class CapturedGraphs(Sequence["BoundStep"]):
    """Graphs of one step, that used last first.

    Args:
        name: of the step, for messages.
        most: how many are kept.
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

    def known(self, call: Call, mode: tuple[Any, ...], retried: Tries | None) -> BoundStep | None:
        """The graph that holds for a call, which is the one used last from now on.

        Args:
            mode: how the call communicates.
            retried: of the branch that is asked before all others.
        """
        from graphopt.runtime.sharing import in_order

        for entry in in_order(self._entries, retried):
            bound = call.using(entry.captured.besides)
            if bound is None or not (entry.goes_on(call.decided) and _fits(entry, bound, mode)):
                continue
            if entry is not self._entries[0]:
                self.land()
                self._entries.remove(entry)
                self._entries.insert(0, entry)
            return entry
        return None

    def add(self, entry: BoundStep) -> None:
        """Keep a new graph, as the one used last."""
        from graphopt.runtime.sharing import join_branch

        join_branch(entry, self._entries)
        self._entries.insert(0, entry)
        self.drop_unusable()

    def state_made(self, by: BoundStep) -> None:
        """A graph has run, and what the first call makes is there: other graphs that were captured
        for the first call, and whose branch it did not take, make it no more."""
        for entry in self._entries:
            if entry is not by:
                entry.captured.state = None

    def make_room(self, cause: Cause | None) -> None:
        """Drop a graph where there are as many as may be kept.

        Args:
            cause: why another one is needed.

        Raises:
            CaptureError: shapes or values have used up what may be kept.
        """
        causes = [entry.cause for entry in self._entries]
        position = dropped(causes, cause, self._most, self._name)
        if position is not None:
            self._entries.pop(position).close()

    def with_counted(self, call: Call, cause: Cause | None) -> Call:
        """A call with the places as inputs whose numbers the step is known to change, and with what
        the step is known to use.

        Args:
            cause: why another graph is needed for it.
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
        """Drop the graphs whose models are gone or whose collectives the ranks have changed."""
        for entry in self._entries:
            if not _is_usable(entry) and entry.module.in_flight:
                entry.close()  # a layer or another model may live on
        self._entries = list(filter(_is_usable, self._entries))

    def forget_waiting(self) -> None:
        """Forget the graphs that hold once what the first call makes is there: it has made
        nothing."""
        self._entries = [entry for entry in self._entries if not entry.captured.state]

    def land(self) -> None:
        """Flush before another graph runs, which other ranks may not do now."""
        if any(entry.needs_all_ranks for entry in self._entries):
            raise GraphOptError(
                "another graph is needed for this call while a collective of the last step is still"
                " to be launched, which needs all ranks\n"
                "  hint:  call flush() of the training step on every rank first"
            )
        self.flush()

    def flush(self) -> None:
        """Do all late work that is in flight."""
        for entry in self._entries:
            entry.flush()

    def close(self) -> None:
        """Do late work that is in flight, or drop it where that is impossible."""
        for entry in self._entries:
            if entry.module.in_flight:
                entry.close()

    def finish(self) -> None:
        """Do late work, or drop that of a call that failed in the middle of an update."""
        for entry in self._entries:
            if entry.module.resumable:
                entry.flush()
            else:
                entry.drop()

    def forget(self) -> None:
        """Keep no graph."""
        self._entries = []


def _is_usable(entry: BoundStep) -> bool:
    """Whether the models of a graph exist and the ranks still agree on its collectives."""
    return entry.guards.may_fit() and (entry.agreed is None or entry.agreed.current)


def _fits(entry: BoundStep, call: Call, mode: tuple[Any, ...]) -> bool:
    from graphopt._compat.late import without_torch_function

    with without_torch_function():  # to look at a tensor's kind is no use of it
        return entry.guards.fit(call, mode)
