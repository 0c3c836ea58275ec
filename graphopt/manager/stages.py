"""Stages: transformations of a graph besides passes, run and recorded like passes.

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
from graphopt.manager.problems import Refused, refusing_errors
from graphopt.manager.records import PassRecord, add_record, count
from graphopt.manager.reproducers import reproducer_folder
from graphopt.manager.settings import Settings
from graphopt.ranks.spmd import launches_digest
from graphopt.verify import Problem
from graphopt.verify.checks.launches import Launch, launches_of, other_launches
from graphopt.verify.stage_checks import StageProof

if TYPE_CHECKING:
    from graphopt.host.votes import Agreement

logger = logging.getLogger("graphopt")


@dataclass(frozen=True)
class DerivedGraph:
    """The name and circumstances of the graph that a stage is given.

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
    """Base class of the stages behind the passes.

    Attributes:
        name: in the list of stages, in records, dumps and refusals.
        in_place: it edits the graph object that it is given; otherwise that stays as it is.
    """

    name = ""
    in_place = False

    def runs_on(self, which: DerivedGraph) -> bool:
        """True if the stage applies to a derived graph."""
        return True

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        """Transforms `gm` and returns it, or another module in its place; the caller drops `gm`."""
        raise NotImplementedError

    def describe(self, record: PassRecord) -> None:
        """Adds to the record of the last `apply` what only the stage knows."""
        return

    def problems(self, gm: fx.GraphModule) -> Iterator[Problem]:
        """Yields problems of the resulting graph that the proof does not cover."""
        return iter(())


class StageRunner:
    """Runs the stages of one list on derived graphs.

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
        """Runs a derived graph through stages, in order.

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
        launches, counted = launches_of(derived), count(derived.graph)
        for stage in stages:
            if not stage.runs_on(which):
                continue
            done = (*done, stage.name)
            attempt = self.attempt(derived, given, done, which.name)
            record = PassRecord(stage.name, {"graph": which.name}, stage=True)
            record.before, before = counted, _kept(stage, derived)
            start = time.perf_counter()
            with crashes_explained(attempt):
                derived = stage.apply(derived, which)
            record.seconds = time.perf_counter() - start
            stage.describe(record)
            problems = self._problems(stage, record, launches, derived, before, proof)
            self.settle(owner, record, attempt, before, derived, problems)
            counted = record.after
        return derived

    def attempt(
        self, gm: fx.GraphModule, given: fx.Graph, done: Sequence[str], graph: str = ""
    ) -> StageAttempt:
        """Returns the error context of a stage that is about to run."""
        folder = reproducer_folder(self._settings.dump_dir)
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
        """Checks, records and dumps the graph that a stage has left.

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
            with refusing_errors():
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
        launches: Sequence[Launch],
        after: fx.GraphModule,
        before: fx.Graph,
        proof: StageProof,
    ) -> Iterator[Problem]:
        """Returns the problems of the graph that a stage has left.

        The order of collectives is looked at whatever is asked for: other ranks rely on it.
        """
        if not record.changed:
            return
        after.graph.lint()
        problem = other_launches(launches, launches_of(after))
        if problem is not None:
            yield problem
        elif self._settings.verify != "off":
            yield from stage.problems(after)
            yield from proof.problems(record.arguments["graph"], before, after)


def _kept(stage: GraphStage, gm: fx.GraphModule) -> fx.Graph:
    """Returns a copy of a stage's input graph, for later comparison."""
    if not stage.in_place:
        return gm.graph
    copy, _ = copy_graph(gm.graph)
    return _compat.lazy_graph_module(gm, copy).graph


@contextmanager
def crashes_explained(attempt: StageAttempt) -> Iterator[None]:
    """A context in which errors name the stage that raised them, and how to reproduce them."""
    try:
        yield
    except Exception as error:
        raised = crash_of_stage(error, attempt)
        raise raised from raised.__cause__
