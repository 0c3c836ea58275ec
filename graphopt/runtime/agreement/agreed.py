"""The agreement of all ranks on a step's graphs, and the capture of one call on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from graphopt.errors import SpmdMismatchError
from graphopt.guards.guards import Guards
from graphopt.host.decisions.assumptions import Answer
from graphopt.host.votes import Agreement, Votes
from graphopt.parallel import OverRanks
from graphopt.parallel.markers import markers_of, marks_gradient
from graphopt.ranks.independent_ranks import ranks_together
from graphopt.ranks.rank_votes import RankVotes
from graphopt.ranks.spmd import DECIDE_ALIKE, collective_plan, plan_lines
from graphopt.ranks.unused import UnusedParameters
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.inputs.entries import Inputs
from graphopt.tracing.inputs.remembered import with_remembered

Plans = dict[str, list[str]]
"""Every collective of each graph that is derived from a step, one line each."""


class OneVote:
    """A vote of all ranks on having a graph for a call, which each of them casts once.

    Args:
        step: the number of the step function's call, counted from 1.

    Attributes:
        is_cast: whether this rank has.
    """

    def __init__(self, votes: Votes | RankVotes, step: int) -> None:
        self._votes, self._step = votes, step
        self.is_cast = False

    def __call__(self, number: int) -> bool:
        """Tells the other ranks for which agreement (`RankAgreement.number`) this rank has a graph,
        0 for none; returns whether all have one for the same."""
        self.is_cast = True
        return self._votes.alike(number, self._step)


@dataclass(frozen=True)
class OtherRanks:
    """The state of the other ranks while this rank needs another graph for a call.

    Attributes:
        alone: true if they have gone on with the call, and cannot come to agree.
        agreed: the agreement of the graphs that they run then.
        at: the user's line that makes this rank need another one, for messages.
        vote: they need one as well, and vote on it.
        anew: they come to agree anew.
        launched: some have joined collectives of this call, in which its function cannot run from
            the beginning.
    """

    alone: bool = False
    agreed: RankAgreement | None = None
    at: str = ""
    vote: OneVote | None = None
    anew: bool = False
    launched: bool = False


class NotAsAgreedError(Exception):
    """A step needs other communication than the ranks agreed on before.

    Args:
        difference: of what it launches, in words.
    """

    def __init__(self, difference: str = "") -> None:
        self.difference = difference
        super().__init__(difference)


class NoGraphAloneError(SpmdMismatchError):
    """A rank has no graph with the collectives that the other ranks launch in this call.

    Args:
        at: the user's line at which it decided otherwise.
        difference: of what it would launch from then on, in words.
        answers: to the decisions of the call, as far as they are known.
    """

    def __init__(self, at: str, difference: str = "", answers: tuple[Answer, ...] = ()) -> None:
        self.answers = answers
        what = f": it {difference}" if difference else ""
        super().__init__(
            f"this rank decided otherwise than other ranks{at}\n  and communicates otherwise from"
            f" there on than they do{what}\n  hint:  {DECIDE_ALIKE}"
        )


@dataclass
class RankAgreement:
    """The decisions that all ranks made for one structure of the step's arguments.

    Attributes:
        guards: recognise the structure again.
        parameters: the parameters whose gradients are averaged, in launch order.
        unused: the exchange of the parameters that other ranks use in a call.
        plans: every collective of each graph that runs.
        held: names of what some rank holds in a way in which its use is not seen.
        questions: the votes of the ranks in a call, or None.
        asks: before each call, whether all ranks have a graph for this, since a rank may use
            parameters that are not among them, or in other rounds, or go a way that launches
            something else.
        number: counts what the ranks of this step have agreed on.
        votes: the votes that no function called by `graphopt.callback` has raised.
        agreement: when in each call they do.
        every_round: each round of averages in a call averages all parameters of its modules.
        rounds: else, for each of `parameters`, the rounds in which it is averaged.
        likely: answers to the decisions of the branch that all ranks try first in this call.
        current: False once the ranks have agreed on more; graphs made for it must not run then.
    """

    guards: Guards
    parameters: tuple[weakref.ref[torch.Tensor], ...]
    unused: UnusedParameters
    plans: Plans
    held: frozenset[str]
    questions: RankVotes | None
    asks: bool
    number: int
    votes: Votes
    agreement: Agreement
    current: bool = True
    every_round: bool = False
    rounds: tuple[tuple[int, ...], ...] = ()
    likely: tuple[Answer, ...] = ()

    def order(self, inputs: Inputs) -> tuple[str, ...]:
        """The parameters whose gradients are averaged, in the agreed order, under the names of
        this call; those that the call does not reach are left out."""
        names = {id(entry.tensor): entry.fqn for entry in inputs.parameters}
        found = (names.get(id(parameter())) for parameter in self.parameters)
        return tuple(name for name in found if name is not None)

    def launches_as(self, other: RankAgreement) -> bool:
        """True if graphs under this agreement and the other launch the same collectives."""
        return self.plans == other.plans and self.agreement == other.agreement

    def holds_for_all(self, step: int) -> bool:
        """True if all ranks have a graph for this agreement; asked before a call."""
        return not self.asks or self.questions is None or self.questions.alike(self.number, step)

    def hear(self) -> None:
        """Raises if a callback raised on another rank after the last call. Asked before a call;
        graphs that end in a vote ask themselves."""
        if not self.agreement.at_end:
            self.votes.hear()


def ask_before_calls(agreements: Sequence[RankAgreement]) -> None:
    """Makes ranks vote before each call on the agreement that they begin with, if graphs with
    different collectives exist: a rank without a fitting graph cannot know what the others launch.
    Where they do for one agreement, they do for all: nobody knows which one the others begin with.

    Args:
        agreements: all of one structure, the same on all ranks.
    """
    one = agreements[0]
    questions = next((each.questions for each in agreements if each.questions), None)
    alike = all(one.launches_as(each) for each in agreements)
    needed = any(each.asks for each in agreements) or (
        not alike and any(each.agreement.alone for each in agreements)
    )
    if questions is None or not needed:
        return
    for each in agreements:
        each.questions, each.asks = questions, True


class CallCapture:
    """The capture of one call on the ranks of a group; a context manager around all of it.

    This one is for a rank that agrees on nothing: it is alone, or averages nothing in this call.

    Args:
        lasts: see `capture_call`.
        checked: refuses a captured call by `NotAsAgreedError`.

    Attributes:
        agreement: when in each call the ranks say whether a function has raised.
        agreed: the agreement that the graphs stand on; None without communication.
    """

    agreement = Agreement()
    agreed: RankAgreement | None = None

    def __init__(
        self,
        *,
        lasts: bool = True,
        checked: Callable[[Call, CapturedStep], CapturedStep] | None = None,
    ) -> None:
        self._lasts, self._checked = lasts, checked

    def __enter__(self) -> CallCapture:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends the capture: the graphs are ready to run, or it failed with `error`."""

    def capture(self, call: Call) -> CapturedStep:
        """Captures the call, with the communication that the ranks agree on."""
        captured = capture_call(with_remembered(call), lasts=self._lasts)
        return captured if self._checked is None else self._checked(call, captured)

    def agree(self, captured: CapturedStep, graphs: Mapping[str, fx.GraphModule]) -> None:
        """Checks that all ranks have the same plan of collectives, before anything is compiled.

        Args:
            captured: with passes applied.
            graphs: those that run, derived from its graph, by name.

        Raises:
            SpmdMismatchError: the ranks have other collectives.
            NotAsAgreedError: the ranks have to agree anew.
        """

    def ready(self, captured: CapturedStep) -> None:
        """Waits until all ranks have their graphs ready, however long they compile."""


def first_difference(agreed: Plans, own: Plans, graphs: Mapping[str, fx.GraphModule]) -> str:
    """A text on the first collective that differs from the agreed plan; empty without one.

    Args:
        own: plans of this rank's `graphs`.
    """
    for name, wanted in agreed.items():
        lines = plan_lines(graphs[name].graph) if name in graphs else []
        both = zip_longest(wanted, own.get(name, []), fillvalue="nothing")
        for number, (theirs, mine) in enumerate(both):
            if theirs != mine:
                line = "".join(lines[number : number + 1])
                return f"has {mine}, they have {theirs}" + (f"\n  from:  {line}" if line else "")
    return ""


def averages_in(traced: fx.Graph, order: Sequence[str]) -> list[str]:
    """The parameters whose gradients a traced step averages, in the order in which it does.

    Args:
        order: the parameters that the ranks have agreed on.
    """
    names = [marker.args[1] for marker in markers_of(traced) if marks_gradient(marker)]
    numbers = {name: number for number, name in enumerate(order)}
    return [f"the average of parameter {numbers[str(name)]}" for name in names]


def plans_of(
    graphs: Mapping[str, fx.GraphModule], parallel: OverRanks, averages: Sequence[str]
) -> Plans:
    """The plan of each graph: everything that the ranks of a group must do alike.

    A rank that keeps all updates in their step, since somebody holds what they write, has nothing
    late: every step of it is like the first, and a flush sends nothing.

    Args:
        averages: see `averages_in`; collectives alone do not tell parameters of one shape apart.
    """
    ranks = ranks_together(parallel)
    plans = {name: collective_plan(gm.graph, ranks) for name, gm in graphs.items()}
    if "setup" in plans and "main" not in plans:
        plans |= {"main": plans["setup"], "drain": []}
    return {**plans, "averages": list(averages)}
