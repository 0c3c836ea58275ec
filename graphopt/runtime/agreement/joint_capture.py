"""The agreements of ranks on one step, and the ways to capture its calls on several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import fx, nn

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.host.decisions.assumptions import Answer
from graphopt.host.decisions.used import UsedParameters
from graphopt.host.votes import Agreement, Votes
from graphopt.parallel import OverRanks
from graphopt.ranks.meeting import Channel
from graphopt.ranks.rank_votes import RankVotes
from graphopt.ranks.spmd import FREEZE, check_same
from graphopt.runtime.agreement.agreed import (
    CallCapture,
    NoGraphAloneError,
    NotAsAgreedError,
    OneVote,
    OtherRanks,
    RankAgreement,
    ask_before_calls,
    first_difference,
)
from graphopt.runtime.agreement.capture_in_meeting import CaptureInMeeting
from graphopt.runtime.agreement.joined_modules import JoinedModules
from graphopt.runtime.agreement.joint_names import JointNames
from graphopt.runtime.agreement.joint_traces import JointTrace
from graphopt.runtime.agreement.sharded_models import ShardedModels
from graphopt.tracing.call import Call
from graphopt.tracing.capture import communication_for
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.collecting import module_tensors
from graphopt.tracing.inputs.remembered import with_remembered
from graphopt.tracing.ranks.reduction import (
    AgreedOrder,
    MarkedCommunication,
    UnagreedParameterError,
)
from graphopt.tracing.trace import RawTrace


class _CaptureAsAgreed(JointTrace):
    """Captures a call under an earlier agreement, without asking the other ranks.

    Args:
        vote: see `OtherRanks`.

    Attributes:
        answers: to the decisions of the call, as far as nothing depends on the other ranks.
        difference: of what the call launches, in words; empty where there is none.
    """

    def __init__(
        self, joint: JointCapture, agreed: RankAgreement, parallel: OverRanks, vote: OneVote | None
    ) -> None:
        super().__init__(parallel)
        self._vote, self._joint = vote, joint
        self.agreed, self.agreement = agreed, agreed.agreement
        self.answers: tuple[Answer, ...] = ()
        self.difference = ""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, NotAsAgreedError):
            self.difference = error.difference
        if self._vote is not None and not self._vote.is_cast:  # which others wait for
            raise NotAsAgreedError from error

    def capture(self, call: Call) -> CapturedStep:
        assert self.agreed is not None
        call = call if call.decided else call.deciding(self.agreed.likely)
        call = with_remembered(self._joint.prepared(call))
        captured = None
        try:
            while captured is None:
                call, raw, made = self.first_trace(call, self._joint.marked(self._parallel))
                alone = itertools.takewhile(
                    lambda answer: type(answer) is not UsedParameters, raw.inputs.answers
                )
                self.answers = tuple(alone)
                order = self._order(raw)
                communication = self._joint.marked(self._parallel, order)
                call, captured = self.finished(
                    call, raw, made, communication, order.names, self.agreed.held
                )
        except UnagreedParameterError:
            raise NotAsAgreedError from None
        return self._joint.checked(call, captured)

    def _order(self, raw: RawTrace) -> AgreedOrder:
        assert self.agreed is not None
        order = self.agreed.order(raw.inputs)
        if len(order) < len(self.agreed.parameters) or not set(order).issuperset(raw.used):
            raise NotAsAgreedError
        return AgreedOrder(
            *(order, frozenset(raw.used)),
            every_round=self.agreed.every_round,
            rounds=dict(zip(order, self.agreed.rounds, strict=True)),
        )

    def agree(self, captured: CapturedStep, graphs: Mapping[str, fx.GraphModule]) -> None:
        assert self.agreed is not None
        before = self.agreement
        needed = Agreement.needed_by(captured.graph_module.graph)
        same = Agreement.of_all([needed.said, before.said]) == before
        plans = self.plans(graphs)
        if not same or plans != self.agreed.plans:
            raise NotAsAgreedError(first_difference(self.agreed.plans, plans, graphs))
        if self._vote is not None and not self._vote(self.agreed.number):
            raise NotAsAgreedError


class JointCapture:
    """Captures one step function on the ranks of one group.

    The first capture of a structure (modules, modes, optimizer settings) is agreed on by all ranks.
    A later one that differs only in arguments may happen on one rank alone (an uneven last batch,
    a branch taken here only): it averages what was agreed, zeros for what it does not use. A
    parameter that no rank has used before needs a new agreement, in which all ranks have to join.

    Args:
        topic: the same text on all ranks, different for different step functions.
        accumulated: whether gradients of earlier calls alone are averaged as well.

    Attributes:
        sharded_models: the models that the step shards; None for kinds that shard none.
        alone: the last capture was one of this rank alone.
        uneven: ranks have other modules besides those that are trained, which keep their values, or
            do not take the same decisions. Each decision is a rank's own then.
    """

    def __init__(self, topic: str, *, accumulated: bool = True) -> None:
        self.topic, self._accumulated = topic, accumulated
        self.sharded_models: ShardedModels | None = None
        self._agreed: list[RankAgreement] = []
        self.numbers = itertools.count(1)
        """The numbers of the next agreements, the same on all ranks."""
        self._votes: WeakKeyDictionary[dist.ProcessGroup, Votes] = WeakKeyDictionary()
        self._joined = JoinedModules()
        self.alone = self.uneven = False

    def marked(
        self, parallel: OverRanks, agreed: AgreedOrder | None = None
    ) -> MarkedCommunication | None:
        """The communication markers that traces insert."""
        return communication_for(parallel, agreed, accumulated=self._accumulated)

    def prepared(self, call: Call) -> Call:
        """The call in the form in which this rank traces it together with others."""
        return call.deciding_alone() if self.uneven else call

    def ways(
        self, call: Call, parallel: OverRanks, sync: bool, mode: tuple[Any, ...], others: OtherRanks
    ) -> Iterator[CallCapture]:
        """The ways to capture `call`; the first that `NotAsAgreedError` does not refuse counts.

        Raises:
            CollectiveError: the other ranks are not there: `graphopt.testing.fake_ranks`.
        """
        if _compat.fake_world_size() is not None:
            raise CollectiveError(
                "the process group is a fake one, whose other ranks will never come to agree",
                hint="in fake_ranks use graphopt.capture and graphopt.testing.check_pass, which"
                " run graphs for all ranks",
            )
        self.alone = True
        if self._joined.has_all(call) and not sync:
            yield CallCapture(checked=self.checked)
        vote = others.vote
        matching = self._matching(call, mode)
        if others.alone:  # the others run what this graph stands on
            matching = [each for each in matching if each is others.agreed]
        answers: tuple[Answer, ...] = ()
        difference = ""
        for earlier in [] if others.anew else matching:
            if vote is None or not vote.is_cast:
                ranks = _CaptureAsAgreed(self, earlier, parallel, vote)
                yield ranks
                answers, difference = ranks.answers, ranks.difference
        if vote is not None and not vote.is_cast:
            vote(0)
        if others.alone:
            raise NoGraphAloneError(others.at, difference, answers)
        self.alone = False
        group = parallel.everyone
        votes = self._votes.setdefault(group, Votes(group))
        yield CaptureInMeeting(self, call, parallel, sync, mode, self._matching(call, mode), votes)

    def checked(self, call: Call, captured: CapturedStep) -> CapturedStep:
        """Checks the capture that a rank has made alone.

        Raises:
            NotAsAgreedError: it uses modules or parameters besides its arguments that the ranks
                have not started from the same values.
        """
        if not self._joined.has_all(call.using(captured.besides) or call):
            raise NotAsAgreedError
        return captured

    def join(self, call: Call, parallel: OverRanks) -> None:
        """Broadcasts initial values of a call's modules."""
        self._joined.join(call, parallel, uneven=self.uneven)

    def asking(self, call: Call, mode: tuple[Any, ...]) -> RankVotes | None:
        """The vote on having a graph that all ranks take in each call, or None if they take
        none."""
        return next((a.questions for a in self._matching(call, mode) if a.asks), None)

    def run_elsewhere(self, call: Call, mode: tuple[Any, ...]) -> list[RankAgreement]:
        """The agreement whose graphs other ranks may run for a call, if all of them launch the
        same collectives and this rank may leave them; else None."""
        matching = self._matching(call, mode)
        may_leave = all(each.agreement.alone and each.questions for each in matching)
        alike = all(each.launches_as(matching[0]) for each in matching)
        return matching if may_leave and alike else []

    def note(self, agreed: RankAgreement | None, earlier: Sequence[RankAgreement]) -> None:
        """Stores an agreement of the ranks, after earlier ones for branches with other
        collectives."""
        for other in earlier:
            if agreed is None or other.parameters != agreed.parameters:
                other.current = False
                self._agreed.remove(other)
        if agreed is not None:
            self._agreed.append(agreed)
            ask_before_calls([agreed, *(other for other in earlier if other.current)])

    def forget_dead(self) -> None:
        """Drops agreements on models that no longer exist."""
        self._agreed = [agreed for agreed in self._agreed if agreed.guards.alive()]

    def _matching(self, call: Call, mode: tuple[Any, ...]) -> list[RankAgreement]:
        """The agreements on calls of the same structure, most recent first."""
        agreed = reversed(self._agreed)
        return [a for a in agreed if a.guards.structure_mismatch(call, mode) is None]

    def join_eagerly(self, call: Call, parallel: OverRanks) -> list[nn.Module]:
        """Broadcasts initial values of what an eager call trains, once for each module.

        Returns:
            The call's modules that all ranks have.

        Raises:
            SpmdMismatchError: ranks have other modules that are trained, or one did not come.
        """
        if not self._joined.has_trained(call):
            names = JointNames(call, module_tensors(call))
            mine = {"tensors": names.tensors, "besides": names.besides}
            group = parallel.everyone
            if _compat.fake_world_size() is None:  # else there is nobody to ask
                topic = f"{self.topic} as it is"
                self.compare(Channel(group, topic, parallel.timeout).exchange(mine))
            self.join(call, parallel)
        return self._joined.of_all(call, uneven=self.uneven)

    def compare(self, everyone: Sequence[Mapping[str, list[str]]]) -> None:
        """Compares the ranks' tensors, which must be alike, and records if untrained modules
        differ.

        Args:
            everyone: `tensors` and `besides` of the `JointNames` of each rank.
        """
        check_same("parameters or buffers", [theirs["tensors"] for theirs in everyone], FREEZE)
        besides = [theirs["besides"] for theirs in everyone]
        self.uneven |= any(theirs != besides[0] for theirs in besides)
