"""Capture on several ranks: every rank traces alone, then all agree before anything runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _compat
from graphopt.errors import CollectiveError
from graphopt.failed_runs import sending_explained
from graphopt.host_votes import Agreement, Votes
from graphopt.manager import records_of
from graphopt.meeting import Channel, Meeting
from graphopt.parallel import DataParallel
from graphopt.spmd import (
    check_same,
    check_same_plans,
    collective_plan,
    launches_digest,
    merged_order,
)
from graphopt.tracing.call import Call
from graphopt.tracing.capture import (
    CapturedStep,
    capture_call,
    communication_for,
    finish,
    first_trace,
)
from graphopt.tracing.guards import Guards
from graphopt.tracing.inputs import Inputs, bare_tensors
from graphopt.tracing.reduction import UnagreedParameterError
from graphopt.tracing.trace import trace

Optimize = Callable[[CapturedStep], None]
"""Checks a captured step and applies the passes to its graph."""

Finish = Callable[[Call, CapturedStep, Agreement], None]
"""Makes a captured step ready to run."""

_NOTHING = Agreement()


@dataclass
class Agreed:
    """What all ranks decided for one structure of the step.

    Attributes:
        guards: recognise the structure again.
        order: parameters whose gradients are averaged, in launch order.
        plan: every collective, one line each.
        votes: how the ranks agree that no function called by `graphopt.callback` has raised.
        agreement: when in each call they do.
        current: False once the ranks have agreed on more; graphs made for it must not run then.
    """

    guards: Guards
    order: tuple[str, ...]
    plan: list[str]
    votes: Votes
    agreement: Agreement
    current: bool = True

    def hear(self) -> None:
        """Before a call: raise where a function has raised on another rank when the last call, of
        another graph maybe, was over. Graphs whose calls end in an agreement ask themselves."""
        if not self.agreement.at_end:
            self.votes.hear()


class JointCapture:
    """Captures one step function on the ranks of one group.

    The first capture of a structure (modules, modes, optimizer settings) is agreed on by all ranks.
    A later one that differs only in arguments may happen on one rank alone (an uneven last batch,
    a branch taken here only): it averages what was agreed, zeros for what it does not use. A
    parameter that no rank has used before needs a new agreement, in which all ranks have to join.

    Args:
        topic: the same text on all ranks, different for different step functions.
        optimize: done with each captured step before the ranks compare their collectives.
        finish: done with each captured step before any rank runs it; None: nothing.
    """

    def __init__(self, topic: str, optimize: Optimize, finish: Finish | None = None) -> None:
        self._topic, self._optimize = topic, optimize
        self._finish = finish if finish is not None else _nothing
        self._agreed: list[Agreed] = []
        self._joined: WeakSet[nn.Module] = WeakSet()
        self._votes: WeakKeyDictionary[dist.ProcessGroup, Votes] = WeakKeyDictionary()
        self._joined_bare: dict[int, weakref.ref[torch.Tensor]] = {}
        self.alone = False  # whether the last capture was one of this rank alone

    def capture(
        self,
        call: Call,
        parallel: DataParallel,
        sync: bool,
        mode: tuple[Any, ...],
        settled: Collection[str],
    ) -> tuple[CapturedStep, Agreed | None]:
        """Capture `call`; the agreement it stands on is None under `no_sync`.

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
        if self._has_joined(call) and not sync:
            captured = capture_call(call, settled=settled, lasts=True)
            self._optimize(captured)
            self._finish(call, captured, _NOTHING)
            return captured, None
        earlier = self._earlier(call, mode)
        if earlier is not None:
            agreeing = self._as_agreed(call, parallel, earlier, settled)
            if agreeing is not None:
                self._finish(call, agreeing, earlier.agreement)
                return agreeing, earlier
        self.alone = False
        group = _compat.group_or_default(parallel.group)
        votes = self._votes.setdefault(group, Votes(group))
        votes.hear()
        with Channel(group, self._topic, parallel.timeout).meeting() as meeting:
            captured, agreed = self._agree(meeting, call, parallel, sync, mode, earlier, votes)
        self.join(call.using(captured.besides) or call, parallel)
        return captured, agreed if sync else None

    def forget_dead(self) -> None:
        """Drop what was agreed on for models that no longer exist."""
        self._agreed = [agreed for agreed in self._agreed if agreed.guards.alive()]

    def _earlier(self, call: Call, mode: tuple[Any, ...]) -> Agreed | None:
        for agreed in self._agreed:
            if agreed.guards.structure_mismatch(call, mode) is None:
                return agreed
        return None

    def _as_agreed(
        self, call: Call, parallel: DataParallel, agreed: Agreed, settled: Collection[str]
    ) -> CapturedStep | None:
        """Capture with the collectives agreed before; None if the step needs others."""
        communication = communication_for(parallel, agreed.order)
        try:
            call, inputs, raw = first_trace(call, communication)
        except UnagreedParameterError:
            return None
        captured = finish(call, inputs, communication, raw, settled, lasts=True)
        self._optimize(captured)
        same = collective_plan(captured.graph_module.graph) == agreed.plan
        needed = Agreement.needed_by(captured.graph_module.graph)
        same &= Agreement.of_all([needed.said, agreed.agreement.said]) == agreed.agreement
        return captured if same else None

    def _agree(
        self,
        meeting: Meeting,
        call: Call,
        parallel: DataParallel,
        sync: bool,
        mode: tuple[Any, ...],
        earlier: Agreed | None,
        votes: Votes,
    ) -> tuple[CapturedStep, Agreed]:
        call, inputs, raw = first_trace(call, communication_for(parallel) if sync else None)
        mine = {"sync": [f"averaging {sync}"], "tensors": _describe(inputs), "used": raw.used}
        everyone = meeting.exchange(mine)
        check_same("communication mode", [theirs["sync"] for theirs in everyone])
        check_same("parameters or buffers", [theirs["tensors"] for theirs in everyone])
        before = () if earlier is None else earlier.order
        order = merged_order([before, *(theirs["used"] for theirs in everyone)])
        communication = communication_for(parallel, order) if sync else None
        again = raw if order == raw.used else trace(call, inputs, communication)
        captured = finish(call, inputs, communication, again, lasts=True)
        history = [("the capture", launches_digest(captured.graph_module.graph))]
        self._optimize(captured)
        history += [(record.name, record.launches) for record in records_of(captured.graph_module)]
        plan = collective_plan(captured.graph_module.graph)
        needed = Agreement.needed_by(captured.graph_module.graph)
        planned: dict[str, Any] = {"plan": plan, "passes": history, "callbacks": needed.said}
        everyone = meeting.exchange(planned)
        check_same_plans(
            [theirs["plan"] for theirs in everyone], [theirs["passes"] for theirs in everyone]
        )
        agreement = Agreement.of_all([theirs["callbacks"] for theirs in everyone])
        self._finish(call, captured, agreement)
        meeting.exchange({"ready": True})
        guards = Guards(call, inputs, mode, captured.signature.attributes)
        agreed = Agreed(guards, order, plan, votes, agreement)
        if earlier is not None:
            earlier.current = False
            self._agreed.remove(earlier)
        if sync:
            self._agreed.append(agreed)
        return captured, agreed

    def join(self, call: Call, parallel: DataParallel) -> None:
        """What DDP does when it is constructed: everybody starts from rank 0's values. Nothing
        where all modules have."""
        if self._has_joined(call):
            return
        group = _compat.group_or_default(parallel.group)
        for _, root in call.named_roots():
            if parallel.broadcast:
                with sending_explained(group, 1, "broadcast", "what all ranks start from"):
                    _broadcast([*root.parameters(), *root.buffers()], group)
            self._joined.add(root)
        bare = _bare_parameters(call)
        if bare and parallel.broadcast:
            with sending_explained(group, 1, "broadcast", "what all ranks start from"):
                _broadcast(bare, group)
        self._joined_bare.update((id(each), weakref.ref(each)) for each in bare)

    def _has_joined(self, call: Call) -> bool:
        known = self._joined_bare
        return all(root in self._joined for _, root in call.named_roots()) and all(
            id(each) in known and known[id(each)]() is each for each in _bare_parameters(call)
        )


def _nothing(call: Call, captured: CapturedStep, agreement: Agreement) -> None:
    """For graphs that do not run as they are."""


def _describe(inputs: Inputs) -> list[str]:
    return [
        f"{entry.kind} {entry.fqn} {entry.tensor.dtype} {list(entry.tensor.shape)}"
        f"{'' if entry.tensor.requires_grad else ' without gradient'}"
        for entry in inputs.module_tensors
    ]


def _bare_parameters(call: Call) -> list[torch.Tensor]:
    """What is trained and belongs to no module."""
    owned = {id(p) for _, root in call.named_roots() for p in root.parameters()}
    found = {id(t): t for _, t in bare_tensors(call) if t.requires_grad and id(t) not in owned}
    return list(found.values())


def _broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous()
            dist.broadcast(flat, source, group=group)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
