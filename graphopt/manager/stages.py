"""Stages: what happens to a graph besides passes, each an entry that is run as a pass is.

A stage behind the passes takes one of the graphs that are derived from a step (setup, main, drain)
and gives another. `StageRunner` takes its time, records it, writes it where graphs are dumped, and
refuses what does not compute the same, or launches collectives in another order than the ranks
agreed on. A refusal names the stage, and the command that runs the list up to it once more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from graphopt import _compat
from graphopt.iter_graph import copy_graph
from graphopt.manager.callbacks import dump_of
from graphopt.manager.failures import StageAttempt, crash_of_stage, refusal_of_stage
from graphopt.manager.problems import Refused, refusing_what_fails
from graphopt.manager.records import PassRecord, add_record, count
from graphopt.manager.reproducers import folder_beside
from graphopt.manager.settings import Settings
from graphopt.ranks.spmd import launches_digest
from graphopt.verify import Problem
from graphopt.verify.launches import FollowedLaunches
from graphopt.verify.stages import StageProof

if TYPE_CHECKING:
    from graphopt.host.votes import Agreement

logger = logging.getLogger("graphopt")


@dataclass(frozen=True)
class DerivedGraph:
    """The graph that a stage is given.

    Attributes:
        name: "setup", "main", "drain" or "cleanup".
        steady: it is the one that runs again and again.
        once: its step runs a single time, so that compiling it would take longer than it saves.
        agreement: when all ranks agree that no function of the program's has raised.
    """

    name: str
    steady: bool = True
    once: bool = False
    agreement: Agreement | None = None


class GraphStage:
    """Base of stages behind the passes.

    Attributes:
        name: in the list of stages, in records, dumps and refusals.
        in_place: it edits the graph object that it is given; otherwise that stays as it is.
    """

    name = ""
    in_place = False

    def runs_on(self, which: DerivedGraph) -> bool:
        """Whether it has anything to do with such a graph."""
        return True

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        """What `gm` becomes: the same module with another graph, or another module. Whoever calls
        this does not use `gm` any more."""
        raise NotImplementedError

    def problems(self, gm: fx.GraphModule) -> Iterator[Problem]:
        """Problems with the graph that it left, of which terms do not speak."""
        return iter(())


class StageRunner:
    """Runs the stages of one list.

    Args:
        settings: of the manager that runs the passes.
        names: all stages in order, for messages.
    """

    def __init__(self, settings: Settings, names: Sequence[str]) -> None:
        self._settings, self._names = settings, tuple(names)
        self._dump = dump_of(settings)

    def run(
        self,
        stages: Sequence[GraphStage],
        derived: fx.GraphModule,
        which: DerivedGraph,
        owner: fx.GraphModule,
        proof: StageProof,
    ) -> fx.GraphModule:
        """Take a derived graph through stages, in order.

        Args:
            owner: the step, which keeps the records.
            proof: what is known of its graphs.

        Raises:
            VerificationError: a stage has left a broken graph, or one that computes something else.
            PassError: a stage raised something else than an error of graphopt.
            GraphOptError: of another type, that a stage raised.
        """
        given = derived.graph
        done: tuple[str, ...] = ()
        order, counted = FollowedLaunches(derived), count(derived.graph)
        for stage in stages:
            if not stage.runs_on(which):
                continue
            done = (*done, stage.name)
            attempt = self.attempt(derived, given, done, which.name)
            record = PassRecord(stage.name, {"graph": which.name}, stage=True)
            record.before, before = counted, _kept(stage, derived)
            start = time.perf_counter()
            derived = _applied(stage, derived, which, attempt)
            record.seconds = time.perf_counter() - start
            problems = self._problems(stage, record, order, derived, before, proof)
            self.settle(owner, record, attempt, before, derived, problems)
            counted = record.after
        return derived

    def attempt(
        self, gm: fx.GraphModule, given: fx.Graph, done: Sequence[str], graph: str = ""
    ) -> StageAttempt:
        """What an error says of a stage that is about to run; see `StageAttempt`."""
        folder = folder_beside(self._settings.dump_dir)
        return StageAttempt(gm, given, graph, self._names, tuple(done), folder)

    def settle(
        self,
        owner: fx.GraphModule,
        record: PassRecord,
        attempt: StageAttempt,
        before: fx.Graph | None,
        after: fx.GraphModule,
        problems: Iterable[Problem],
    ) -> None:
        """Check what a stage has left, record it, and write it where graphs are dumped.

        Args:
            record: complete but for what the graph is now.
            before: the graph before; None: there was none.
            problems: looked for when this iterates over them.

        Raises:
            VerificationError: there are problems.
        """
        untouched = after.graph is before
        record.after = record.before if untouched else count(after.graph)
        record.launches = launches_digest(after.graph)
        record.changed = not untouched
        try:
            with refusing_what_fails():
                found = list(problems)
                if found:
                    raise Refused(found)
        except Refused as refused:
            raise refusal_of_stage(refused, attempt) from refused.__cause__
        add_record(owner, record)
        logger.info("%s", record)
        if self._dump is not None:
            self._dump.write("_".join(filter(None, [record.name, attempt.graph])), before, after)

    def _problems(
        self,
        stage: GraphStage,
        record: PassRecord,
        order: FollowedLaunches,
        after: fx.GraphModule,
        before: fx.Graph,
        proof: StageProof,
    ) -> Iterator[Problem]:
        """What is wrong with what a stage has left.

        The order of collectives is looked at whatever is asked for: other ranks rely on it.
        """
        if not record.changed:
            return
        after.graph.lint()
        problem = order.problem(after)
        if problem is not None:
            yield problem
        elif self._settings.verify != "off":
            yield from stage.problems(after)
            terms = self._settings.verify != "dependencies"
            yield from proof.problems(record.arguments["graph"], before, after, terms=terms)


def _kept(stage: GraphStage, gm: fx.GraphModule) -> fx.Graph:
    """The graph that a stage is given, to compare with afterwards."""
    if not stage.in_place:
        return gm.graph
    copy, _ = copy_graph(gm.graph)
    return _compat.lazy_graph_module(gm, copy).graph


def _applied(
    stage: GraphStage, gm: fx.GraphModule, which: DerivedGraph, attempt: StageAttempt
) -> fx.GraphModule:
    with crashes_explained(attempt):
        return stage.apply(gm, which)


@contextmanager
def crashes_explained(attempt: StageAttempt) -> Iterator[None]:
    """While active, an error says which stage has raised it, and what runs the stage once more."""
    try:
        yield
    except Exception as error:
        raised = crash_of_stage(error, attempt)
        raise raised from raised.__cause__
