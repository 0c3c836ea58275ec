"""Continuation of a call whose graph's assumption fails, by the graph of another branch.

Nothing has changed yet. The other branch goes on from what both share, or begins the call anew;
ranks that have to take it together agree on it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.branches.other_launches import warn_of_other_launches
from graphopt.branches.sent_collectives import SentBefore
from graphopt.branches.sharing import begun, learn
from graphopt.errors import AssumptionFailedError, SpmdMismatchError
from graphopt.host.decisions.used import UsedParameters
from graphopt.runtime.agreement.agreed import NoGraphAloneError, OneVote, OtherRanks
from graphopt.runtime.bound_step import BoundStep
from graphopt.runtime.recaptures import RecaptureCause
from graphopt.tracing.call import Call

if TYPE_CHECKING:
    from graphopt.stages.calls import Calls


_TURNS = 8
"""The number of branches that a call may leave besides two for each of its decisions."""


class OtherBranch:
    """The branch that a call takes after an assumption of `entry` failed.

    Args:
        calls: of the step.
        entry: the graph that ran, and changed nothing.
        failed: its assumption.
    """

    def __init__(
        self, calls: Calls, entry: BoundStep, call: Call, failed: AssumptionFailedError
    ) -> None:
        self._calls, self._entry, self._failed = calls, entry, failed
        # What stands behind is found out by all ranks together, who guess as `entry` did.
        behind = (
            entry.answers[failed.index + 1 :] if isinstance(failed.found, UsedParameters) else ()
        )
        answers = (*entry.answers_before(failed.index), failed.found, *behind)
        self._call = call.deciding(answers)
        self._cause = RecaptureCause.of_branch(failed.place, failed.found)

    def run(self) -> Any:
        """Runs the call in the other branch, and returns what the step returns."""
        calls, entry, call = self._calls, self._entry, self._call
        self._count_turn()
        left = entry.take_left()
        calls.entries.land()
        other = calls.known(call)
        apart = self._failed.alone or bool(entry.apart)
        going_on = None if apart else begun(left, entry, other, call, calls.number)
        if going_on is None:
            try:
                other = self._graph(other, bool(left.sent))
            except BaseException as error:
                if not self._failed.alone:
                    raise
                other = graph_of_all(calls, entry, call, self._cause, left.sent, error)
                left.sent = {}
        if other is None:
            return calls.fallback.run(call, calls.number)
        result = calls.run_graph(other, call, going_on, left.sent)
        if going_on is None and not apart and calls.stages.hands_out:
            learn(left, entry, other, calls.stages.make_ready)
        return result

    def _count_turn(self) -> None:
        """Ends a call that goes from branch to branch without end."""
        self._calls.turns += 1
        if self._calls.turns <= 2 * len(self._entry.answers) + _TURNS:
            return
        with self._calls.communication.failures_told(self._calls.number):
            raise SpmdMismatchError(
                f"the branches of the step do not settle: {self._failed.place}; ranks use other"
                " parameters in several models of one step: give each model a step of its own"
            )

    def _graph(self, known: BoundStep | None, launched: bool) -> BoundStep | None:
        """The branch's graph, captured if it is unknown or fits no graph of the other ranks.

        Args:
            launched: see `OtherRanks`.
        """
        failed, entry = self._failed, self._entry
        if known is not None and failed.alone and not _stand_on_same(known, entry):
            if known.decides_no_more(failed.index):
                with self._calls.communication.failures_told(self._calls.number):
                    raise NoGraphAloneError(f": {failed.place}")
            known = None
        vote = self._vote()
        if known is not None:
            number = known.agreed.number if known.agreed else 0
            if vote is None or vote(number):
                return known
        vote = vote if known is None else None
        alone = (failed.alone, entry.agreed, f": {failed.place}")
        others = OtherRanks(*alone, vote=vote, anew=known is not None, launched=launched)
        other = self._calls.captured_or_refused(self._call, self._cause, others)
        if other is not None:
            warn_of_other_launches(entry, other, failed)
        return other

    def _vote(self) -> OneVote | None:
        """The vote of all ranks on having the same graph, or None if there is none."""
        agreed = self._entry.agreed
        if agreed is None or self._failed.alone:
            return None
        return OneVote(agreed.votes, self._calls.number)


def graph_of_all(
    calls: Calls,
    entry: BoundStep,
    call: Call,
    cause: RecaptureCause | None,
    sent: SentBefore,
    error: BaseException,
) -> BoundStep | None:
    """The graph that all ranks take for a call that this rank leaves, before any of it has run.

    Args:
        calls: of the step.
        entry: launches what other ranks launch, if they go on.
        cause: why another graph is needed.
        sent: what this rank has launched.
        error: why it leaves.
    """
    known, number, lacks = None, None, isinstance(error, NoGraphAloneError)
    if isinstance(error, NoGraphAloneError):
        known = calls.known(call.deciding(error.answers) if error.answers else call)
        number = known.agreed.number if known is not None and known.agreed is not None else 0
    number = entry.leave(calls.number, sent, number)
    if number is None:
        raise SpmdMismatchError(str(error)) if lacks else error
    if number:
        return known
    return calls.captured_or_refused(call, cause, OtherRanks(anew=True))


def _stand_on_same(one: BoundStep, other: BoundStep) -> bool:
    """True if two graphs' agreements launch the same collectives."""
    plans = [each.agreed and each.agreed.plans for each in (one, other)]
    return plans[0] == plans[1]
