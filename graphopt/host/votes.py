"""Votes of all ranks that no host callback has raised.

    callback(…)   launch   launch   agree      update   callback(…)
    └─ raises ──────────────────── ▲ says so            └─ raises ─ the end of the call ▲ says so

Nobody may leave a step between its collectives: the others would wait for what is never sent. So a
rank whose function raises goes on until all collectives are launched. Then every rank *says* in one
number, a collective of its own, whether it goes on. Two kinds of places need that:

- before state is updated, if a function may raise before that: all ranks say and hear there, and
  where one has failed none of them updates anything;
- at the end of the call, if a function may raise after an update. Nobody waits for this: it is
  heard in the next call before its first collective, which the rank that failed might not join.

Where a rank may decide by values of its own, all ranks say behind their last launch that they have
found a graph for the way that they take: a rank that finds none joins the collectives of the others
with zeros (`graphopt.ranks.joining_with_zeros`), so that these come to that place, and end there.
Nobody may wait there earlier: what is launched behind it may be what another rank waits for to get
there.

Updates that stand between launches, as those of buffers do, are no exception
(`graphopt.host.early_updates`).

What was raised stands in the store of the process group, where errors of running steps are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import find_nodes, get_output, is_collective
from graphopt.host import host_call_of
from graphopt.host.decisions.assumptions import Assumption
from graphopt.host.decisions.used import UsedParameters
from graphopt.host.early_updates import updated_state, with_updates_behind
from graphopt.host.running import agree, all_go_on, hear
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import late_group, set_value
from graphopt.ranks.failed_runs import sending_explained
from graphopt.ranks.failure_reports import reasons, tell


@dataclass(frozen=True)
class Agreement:
    """The points of a call at which ranks vote on callback errors.

    Attributes:
        before_updates: before state is updated, where nobody goes on until all have said it.
        at_end: when the call is over.
        alone: before state is updated, that they have a graph for what they decide alone.
    """

    before_updates: bool = False
    at_end: bool = False
    alone: bool = False

    @classmethod
    def needed_by(cls, graph: fx.Graph) -> Agreement:
        """The votes that one rank's graph needs for its callbacks."""
        found = [call for call in map(host_call_of, graph.nodes) if call is not None]
        calls = [call for call in found if not isinstance(call, Assumption)]
        return cls(
            any(not call.last for call in calls),
            any(not call.first for call in calls),
            any(map(decides_alone, found)),
        )

    @classmethod
    def of_all(cls, everyone: Sequence[Sequence[bool]]) -> Agreement:
        """The votes that any rank needs, from `said` of each."""
        return cls(*map(any, zip(*everyone, strict=True)))

    @property
    def said(self) -> list[bool]:
        """This rank's needs, in the form sent to other ranks."""
        return [self.before_updates, self.at_end, self.alone]

    def __bool__(self) -> bool:
        return any(self.said)


class Votes:
    """The channel for the votes of one group's ranks on calls of one step function."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._said: tuple[dist.Work, torch.Tensor, int] | None = None

    def say(self, step: int, error: BaseException | None) -> None:
        """Sends this rank's vote to all ranks: it goes on, or why it does not. Waits for nobody.

        Args:
            step: which call of the step function it is about, counted from 1.
        """
        failed = 0
        if error is not None:
            tell(self._group, step, error)
            failed = self._group.rank() + 1
        number = torch.tensor([failed], device=_compat.device_of(self._group))
        with sending_explained(self._group, step, "all_reduce"):
            work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True)
        # Who has failed itself is not told of others that failed in the same call.
        self._said = (work, number, step) if error is None else None

    def hear(self) -> None:
        """Waits for all ranks' votes that match this rank's last one.

        Raises:
            SpmdMismatchError: a function has raised on another rank.
            CollectiveError: another rank has gone.
        """
        said, self._said = self._said, None
        if said is None:
            return
        work, number, step = said
        with sending_explained(self._group, step, "all_reduce"):
            work.wait()
            other = int(number.item()) - 1
        if other >= 0:
            self._raise(other, step)

    def alike(self, number: int, step: int) -> bool:
        """True if all ranks vote for the same number other than 0. Waits for all of them.

        Args:
            number: at least 0.
            step: which call of the step function it is about, counted from 1.
        """
        device = _compat.device_of(self._group)
        said = torch.tensor([number, -number], dtype=torch.int64, device=device)
        with sending_explained(self._group, step, "all_reduce"):
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
            most, least = said.tolist()
        return bool(number and most == -least)

    def _raise(self, other: int, step: int) -> None:
        reason = reasons(self._group, step).get(other, "an error")
        raise SpmdMismatchError(
            f"a function called by graphopt.callback raised on rank {other}, so rank"
            f" {self._group.rank()} ends the step as well\n  rank {other} said:  {reason}"
        )


def decides_alone(target: object) -> bool:
    """True if a target is an assumption on a value that may differ between ranks."""
    return (
        isinstance(target, Assumption)
        and target.alone
        and not isinstance(target.answer, UsedParameters)
    )


def commit_before(graph: fx.Graph) -> fx.Node:
    """The first state update after the last collective launch, or the output: the point at which
    all ranks vote if the step goes on."""
    effects = Effects(graph)
    found: fx.Node | None = None
    for node in graph.nodes:
        if is_collective(node):
            found = None
        elif found is None and late_group(node) is None and updated_state(node, effects):
            found = node
    return found or get_output(graph)


def with_agreement(gm: fx.GraphModule, agreement: Agreement) -> fx.GraphModule:
    """Inserts votes of all ranks on callback errors into a graph, in place."""
    graph = gm.graph
    if agreement.alone or agreement.before_updates:
        with graph.inserting_before(with_updates_behind(graph, commit_before(graph))):
            for target in [all_go_on] * agreement.alone + [agree] * agreement.before_updates:
                set_value(graph.call_function(target), None)
    if agreement.at_end:
        launches = find_nodes(graph, lambda node: is_collective(node) or node.target is agree)
        first = launches[0] if launches else get_output(graph)
        with graph.inserting_before(_outside_late_work(graph, first)):
            set_value(graph.call_function(hear), None)
    gm.recompile()
    return gm


def _outside_late_work(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The last place up to a node outside late work, which an error inside it would lose."""
    nodes: list[fx.Node] = list(graph.nodes)
    place = nodes.index(node)
    for group in {late_group(n) for n in nodes} - {None}:
        places = [index for index, n in enumerate(nodes) if late_group(n) == group]
        if places[0] < place <= places[-1]:
            return _outside_late_work(graph, nodes[places[0]])
    return nodes[place]
