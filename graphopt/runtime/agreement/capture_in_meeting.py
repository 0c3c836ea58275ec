"""Capture in a meeting of all ranks: each traces alone, then all agree before anything runs."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from graphopt.guards.guards import Guards
from graphopt.host.votes import Agreement, Votes
from graphopt.manager import records_of
from graphopt.parallel import OverRanks
from graphopt.ranks.buffer_groups import make_group_of_buffers
from graphopt.ranks.meeting import Channel, Meeting
from graphopt.ranks.rank_votes import RankVotes
from graphopt.ranks.spmd import check_same, check_same_plans, merged_order, plan_lines
from graphopt.ranks.unused import UnusedParameters
from graphopt.runtime.agreement.agreed import CallCapture, RankAgreement
from graphopt.runtime.agreement.joint_names import JointNames
from graphopt.runtime.agreement.joint_traces import (
    JointTrace,
    decisions,
    left_out,
    outcomes,
    trained,
)
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.notes import held_names
from graphopt.tracing.inputs.remembered import with_remembered
from graphopt.tracing.ranks.reduction import (
    AgreedOrder,
    MarkedCommunication,
    Use,
    differ_in_rounds,
    differ_within_modules,
    roots_of_parameters,
)
from graphopt.tracing.trace import RawTrace

if TYPE_CHECKING:
    from graphopt.runtime.agreement.joint_capture import JointCapture


_COMPARED = ("plans", "history", "decided", "lines")


class CaptureInMeeting(JointTrace):
    """Captures a call in a meeting of all ranks.

    Args:
        joint: keeps what they agree on.
        sync: whether gradients are averaged.
        mode: the mode of communication of the call.
        earlier: what they agreed on for the same structure before, the last first.
        votes: how they agree that no function has raised.
    """

    def __init__(
        self,
        joint: JointCapture,
        call: Call,
        parallel: OverRanks,
        sync: bool,
        mode: tuple[Any, ...],
        earlier: Sequence[RankAgreement],
        votes: Votes,
    ) -> None:
        super().__init__(parallel)
        self._joint, self._call, self._sync = joint, call, sync
        self._mode, self._earlier, self._votes = mode, earlier, votes

    def __enter__(self) -> CallCapture:
        self._votes.hear()
        group = self._parallel.everyone
        self._meeting = Meeting(Channel(group, self._joint.topic, self._parallel.timeout))
        self._meeting.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._meeting.__exit__(kind, error, traceback)
        if error is None:
            self._joint.join(self._call, self._parallel)

    def capture(self, call: Call) -> CapturedStep:
        captured: CapturedStep | None = None
        call = with_remembered(call)
        call = self._joint.prepared(call) if self._sync else call
        self._separate_buffers(call)
        while captured is None:
            call, raw, made = self.first_trace(call, self._communication(None))
            if self._shard(call):
                continue
            communication = self._communication(self._meet(call, raw))
            if self._sync and self._joint.uneven and not call.decides_alone:
                call = call.deciding_alone()
                continue
            call, captured = self.finished(call, raw, made, communication, self._order, self._held)
            everyone = self._meeting.exchange({"complete": captured is not None})
            if not all(theirs["complete"] for theirs in everyone):
                captured = None
        self._call = call
        return captured

    def _separate_buffers(self, call: Call) -> None:
        if self._sync and self._parallel.broadcast_buffers:
            group = self._parallel.everyone
            make_group_of_buffers(group, [root for _, root in call.named_roots()], self._meeting)

    def _shard(self, call: Call) -> bool:
        """Shards what the trace has found besides the arguments; True if the call has changed."""
        models = self._joint.sharded_models
        if models is None:
            return False
        everyone = self._meeting.exchange({"new": models.has_new(call)})
        return any(theirs["new"] for theirs in everyone) and models.shard(call, together=True)

    def _communication(self, order: AgreedOrder | None) -> MarkedCommunication | None:
        return self._joint.marked(self._parallel, order) if self._sync else None

    def _meet(self, call: Call, raw: RawTrace) -> AgreedOrder:
        """Compares the ranks' traces; returns which gradients are averaged."""
        inputs = raw.inputs
        names = JointNames(call, inputs.module_tensors)
        uniform, alone = decisions(raw)
        mine = {
            "sync": [f"averaging {self._sync}"],
            "tensors": names.tensors,
            "besides": names.besides,
            "used": list(zip(names.told(raw.used), raw.used.values(), strict=True)),
            "held": names.told(sorted(held_names(raw))),
            "uniform": uniform,
            "alone": alone,
            "trained": names.told(trained(call, inputs, raw.used)),
        }
        everyone = self._meeting.exchange(mine)
        check_same("communication mode", [theirs["sync"] for theirs in everyone])
        self._joint.compare(everyone)
        before = [earlier.order(inputs) for earlier in self._earlier]
        used = [
            {name: rounds for told, rounds in theirs["used"] for name in names.own([told])}
            for theirs in everyone
        ]
        self._joint.uneven |= any(theirs["uniform"] != uniform for theirs in everyone)
        alone = any(theirs["alone"] for theirs in everyone)
        others = [names.own(theirs["trained"]) for theirs in everyone] if alone else []
        self._order = merged_order([*before, *map(tuple, used), *others])
        self._asks = bool(left_out(call, inputs, self._order))
        self._held = frozenset().union(*(names.own(theirs["held"]) for theirs in everyone))
        uses = [
            frozenset((name, each) for name, rounds in theirs.items() for each in rounds)
            for theirs in used
        ]
        self._every_round = differ_in_rounds(uses) or any(e.every_round for e in self._earlier)
        anywhere = frozenset[Use]().union(*uses)
        self._rounds: dict[str, list[int]] = {name: [] for name in self._order}
        for name, number in sorted(anywhere):
            self._rounds[name].append(number)
        roots = roots_of_parameters([root for _, root in call.named_roots()], inputs)
        self._asks |= not self._every_round and differ_within_modules(self._rounds, roots)
        return AgreedOrder(
            *(self._order, frozenset(raw.used), anywhere, self._every_round, self._rounds)
        )

    def agree(self, captured: CapturedStep, graphs: Mapping[str, fx.GraphModule]) -> None:
        self._plans = self.plans(graphs)
        needed = Agreement.needed_by(captured.graph_module.graph)
        history = [(record.name, record.launches) for record in records_of(captured.graph_module)]
        planned: dict[str, Any] = {
            "plans": list(self._plans.items()),
            "lines": [
                plan_lines(graphs[name].graph) if name in graphs else [] for name in self._plans
            ],
            "history": history,
            "callbacks": needed.said,
            "channel": secrets.token_hex(8),
            "asks": self._asks or needed.alone,
            "decided": outcomes(captured.graph_module.graph),
        }
        everyone = self._meeting.exchange(planned)
        check_same_plans(*([theirs[said] for theirs in everyone] for said in _COMPARED))
        self.agreement = Agreement.of_all([theirs["callbacks"] for theirs in everyone])
        asking = self._sync and any(theirs["asks"] for theirs in everyone)
        group = self._parallel.everyone
        self._questions = RankVotes.of(group, everyone[0]["channel"]) if asking else None

    def ready(self, captured: CapturedStep) -> None:
        self._meeting.exchange({"ready": True}, patient=True)
        with captured.state_present():
            guards = Guards(self._call, captured.live, self._mode, captured.signature)
        entries = {entry.fqn: entry.tensor for entry in captured.live.parameters}
        parameters = tuple(weakref.ref(entries[name]) for name in self._order)
        group = self._parallel.everyone
        unused = UnusedParameters(group, self._joint.topic)
        agreed = RankAgreement(
            *(guards, parameters, unused, self._plans, self._held),
            *(self._questions, self._asks, next(self._joint.numbers)),
            votes=self._votes,
            agreement=self.agreement,
            every_round=self._every_round,
            rounds=tuple(map(tuple, self._rounds.values())),
        )
        self._joint.note(agreed if self._sync else None, self._earlier)
        self.agreed = agreed if self._sync else None
