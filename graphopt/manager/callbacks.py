"""Callbacks that a `PassManager` calls around each pass; passes know nothing of them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.errors import FileError
from graphopt.ir import user_files as places
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.rewritten_places import RewrittenPlace, rewritten_places
from graphopt.iter_graph import IterGraphModule, check_late
from graphopt.manager.declaration import Pass
from graphopt.manager.problems import Refused, refusing_errors
from graphopt.manager.records import PassRecord
from graphopt.manager.settings import Settings
from graphopt.manager.snapshot import Snapshot
from graphopt.manager.text import Pipeline
from graphopt.manager.unread_collectives import newly_unread
from graphopt.readable import graph_diff, graph_text
from graphopt.verify import Problem
from graphopt.verify.checks import structure
from graphopt.verify.checks.group_checks import changed_groups
from graphopt.verify.checks.interface import changed_arguments, kinds_returned, returned_problems
from graphopt.verify.checks.written_nodes import KindsOfResults, changed_problems
from graphopt.verify.dependencies import check_dependencies
from graphopt.verify.dependency.matching import correspondence_by_name, same_nodes
from graphopt.verify.equivalence import EquivalenceReport, Proof
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.trials.exchanged_regions import RewrittenRegions

logger = logging.getLogger("graphopt")


@dataclass
class PassContext:
    """One application of a pass, as callbacks see it.

    Attributes:
        gm: the graph module; in `failed` it is again what it was before the pass.
        pass_: the pass.
        arguments: the value of each of its options.
        pipeline: what it is a part of.
        index: its place there.
        before: the graph module before the pass; not to be changed.
        record: complete in `after_pass`, except for what other callbacks add.
        changed: nodes that the pass has changed, with the `meta["val"]` that they had; None as long
            as that is not known.

    >>> from graphopt.manager import PassCallback
    >>> class Nodes(PassCallback):
    ...     def before_pass(self, context):
    ...         print(len(context.gm.graph.nodes) == context.record.nodes_before)
    >>> _ = graphopt.PassManager("schedule_comm_wait", callbacks=[Nodes()]).run(gm)
    True
    """

    gm: fx.GraphModule
    pass_: Pass
    arguments: Mapping[str, Any]
    pipeline: Pipeline
    index: int
    before: Snapshot
    record: PassRecord
    changed: list[tuple[fx.Node, Any]] | None = None


class PassCallback:
    """Base class of callbacks. `before_pass` runs in list order, the other methods in reverse.

    An exception in `before_pass` or `after_pass` ends the run, with the graph as before the pass.
    So does an edit of the graph in `after_pass`: it would not be checked.

    >>> from graphopt.manager import PassCallback
    >>> class Names(PassCallback):
    ...     def after_pass(self, context):
    ...         print(context.pass_.name)
    >>> _ = graphopt.PassManager("schedule_comm_wait", callbacks=[Names()]).run(gm)
    schedule_comm_wait
    """

    def before_pass(self, context: PassContext) -> None:
        """Runs before the pass."""

    def after_pass(self, context: PassContext) -> None:
        """Runs after the pass, if that left a well-formed graph."""

    def failed(self, context: PassContext, error: BaseException) -> None:
        """Runs after the pass raised or was refused, with the graph restored."""


class Timing(PassCallback):
    """Measures the seconds of each pass, and logs a line for it."""

    def __init__(self) -> None:
        self._start = 0.0

    def before_pass(self, context: PassContext) -> None:
        self._start = time.perf_counter()

    def after_pass(self, context: PassContext) -> None:
        context.record.seconds = time.perf_counter() - self._start
        logger.info("%s", context.record)


class Verification(PassCallback):
    """Refuses a pass that loses a dependency or, at level "equivalence", changes a value.

    Where a graph is proven to compute the same, of the dependencies only that is looked at of which
    terms do not speak. A graph of which they cannot speak at all, such as one without metadata, is
    checked for its dependencies alone.
    """

    def __init__(self, level: str, proof: Proof | None = None) -> None:
        self._prove = level == "equivalence"
        self._proof = Proof() if proof is None else proof
        self._kinds = KindsOfResults()

    def before_pass(self, context: PassContext) -> None:
        if not self._prove or context.pass_.changes_numerics or not context.before.annotated:
            return
        if not self._proof.knows(context.gm.graph):
            with suppress(Exception):  # what is wrong is found, and told, when it is compared
                self._proof.learn(context.gm)

    def after_pass(self, context: PassContext) -> None:
        problems = context.before.module_state.problems()
        if problems:
            raise Refused(problems)
        if context.record.changed:
            with refusing_errors():
                self._check(context)

    def _check(self, context: PassContext) -> None:
        late = check_late(context.gm)
        if late:
            raise Refused([Problem(text) for text in late])
        unread = newly_unread(context.gm.graph, context.before)
        if unread is not None:
            raise Refused([unread])
        wrong = list(changed_groups(context.before.graph, context.gm.graph))
        if wrong:
            raise Refused(wrong)
        if self._prove and context.before.annotated and not context.pass_.changes_numerics:
            problems = self._problems_by_proof(context)
        else:
            problems = self._problems_by_dependencies(context)
            if problems and self._is_proven(context):
                problems = []
        if problems:
            raise Refused(problems, of_values=True)

    def _problems_by_proof(self, context: PassContext) -> list[Problem]:
        """Returns the problems found by a proof that a pass keeps all bits of the results."""
        before, gm = context.before, context.gm
        wrong = self._metadata_problems(context) or list(structure.waits_of_launches(gm.graph))
        if wrong:
            self._proof.forget()
            raise Refused(self._dependencies_lost(context) or wrong)
        report = self._report(context)
        if not report.decidable:
            logger.info("%s: %s", context.pass_.name, report.problems[0].message)
            return self._dependencies_lost(context) or _kept_nodes_changed(context)
        problems = report.problems or _calls_of_host(before, gm.graph, self._proof)
        if not problems:
            return []
        self._proof.forget()
        return self._dependencies_lost(context) or problems

    def _is_proven(self, context: PassContext) -> bool:
        """True if the proof succeeds although dependencies changed. A proven graph is accepted at
        every level, whatever the pass declares."""
        gm, before = context.gm, context.before
        if not before.annotated or self._metadata_problems(context):
            return False
        if list(structure.waits_of_launches(gm.graph)):
            return False
        report = self._report(context)
        proven = (
            report.decidable and report.ok and not _calls_of_host(before, gm.graph, self._proof)
        )
        self._proof.forget()
        return proven

    def _report(self, context: PassContext) -> EquivalenceReport:
        sends = not context.pass_.changes_communication
        known = self._proof.known is not None
        report = self._proof.follow(context.gm, sends=sends) if known else None
        if report is not None and report.ok:
            return report
        try:
            self._proof.learn(context.before.graph)  # with its nodes as they were
        except NotDecidedError as error:
            if report is not None:  # the copy has no module, in which parts are looked up
                return report
            return EquivalenceReport([error.problem], decidable=False)
        return self._proof.follow(context.gm, sends=sends)

    def _problems_by_dependencies(self, context: PassContext) -> list[Problem]:
        """Returns lost dependencies, and at level "equivalence" changed values outside rewritten
        places."""
        numerics = context.pass_.changes_numerics
        places = rewritten_places(context.gm.graph) if numerics else []
        problems = self._dependencies_lost(context) or self._metadata_problems(context)
        self._proof.forget()
        if not problems and self._prove and (places or not numerics):
            return self._not_equivalent(context, places)
        return problems or _kept_nodes_changed(context)

    def _dependencies_lost(self, context: PassContext) -> list[Problem]:
        return check_dependencies(
            context.before.graph,
            context.gm.graph,
            correspondence=context.before.correspondence,
            same_dtypes=not context.pass_.changes_numerics,
            same_communication=not context.pass_.changes_communication,
        ).problems

    def _not_equivalent(
        self, context: PassContext, places: Sequence[RewrittenPlace]
    ) -> list[Problem]:
        same = context.before.correspondence
        if not context.before.annotated or same is None:
            return []
        regions = RewrittenRegions(places, same)
        problems = list(regions.problems())
        if problems:
            return problems
        report = self._proof.compare(context.before.graph, context.gm, regions)
        if report.decidable:
            return report.problems
        logger.info("%s: %s", context.pass_.name, report.problems[0].message)
        return _kept_nodes_changed(context)

    def _metadata_problems(self, context: PassContext) -> list[Problem]:
        """Returns wrong metadata of new or changed nodes, and changed kinds of results."""
        before, gm = context.before, context.gm
        if not before.annotated:
            return []
        new = before.new_nodes()
        changed = before.changed_nodes() if context.changed is None else context.changed
        found = changed_problems(
            new, changed, before.former_arguments, functional=before.functional, kinds=self._kinds
        )
        problems = list(found)
        if before.kinds_returned != kinds_returned(gm.graph):
            problems += returned_problems(before.graph, gm.graph)
        return problems


def _calls_of_host(before: Snapshot, graph: fx.Graph, proof: Proof) -> list[Problem]:
    """Returns problems with the program's host calls, if it has any."""
    if proof.known is None or not proof.known.calls_of_host:
        return []
    old, same = before.graph, before.correspondence
    same = correspondence_by_name(old, graph) if same is None else same
    same = same_nodes(old, graph, same)
    return [
        *structure.host_calls(old, graph, same),
        *structure.updates_around_calls(MemoryOrder(old), MemoryOrder(graph), same),
    ]


def _kept_nodes_changed(context: PassContext) -> list[Problem]:
    """Returns kept nodes that were changed, for graphs without a proof."""
    same = context.before.correspondence
    if same is None or context.pass_.changes_numerics:
        return []
    return list(changed_arguments(context.gm.graph, same))


class Dump(PassCallback):
    """Writes the graph after each pass to files.

    `after_<pass>.txt` is the graph, `after_<pass>.diff` what changed. For an `IterGraphModule`
    there are `after_<pass>_setup.txt` and the same for main, drain and cleanup. A pass that comes
    again gets `after_<pass>_2`, and so on. With several ranks, each writes to a folder of its own.

    Args:
        required: whether the run ends where a file cannot be written (the disk is full); if not, a
            warning says so, since training matters more.
    """

    def __init__(self, folder: Path, *, required: bool = True) -> None:
        rank = _compat.rank_among_several()
        self._folder = folder if rank is None else folder / f"rank{rank}"
        self._required = required

    def after_pass(self, context: PassContext) -> None:
        self.write(context.pass_.name, context.before.graph, context.gm)

    def write(self, name: str, before: fx.Graph | None, gm: fx.GraphModule) -> None:
        """Writes one graph.

        Args:
            name: what has left it.
            before: the graph before that; None: there was none.
        """
        try:
            with places.named(self._folder, "written to"):
                self._write(name, before, gm)
        except FileError as error:
            if self._required:
                raise
            warnings.warn(f"GRAPHOPT_DUMP: {error}", RuntimeWarning, stacklevel=2)

    def _write(self, name: str, before: fx.Graph | None, gm: fx.GraphModule) -> None:
        places.make_folder(self._folder)
        stem = self._free_stem(f"after_{name}")
        for suffix, text in _files(name, before, gm):
            places.write(self._folder / f"{stem}{suffix}", text)

    def _free_stem(self, stem: str) -> str:
        stems = chain([stem], (f"{stem}_{number}" for number in count(2)))
        return next(free for free in stems if not (self._folder / f"{free}.txt").exists())


def _files(name: str, before: fx.Graph | None, gm: fx.GraphModule) -> Iterator[tuple[str, str]]:
    yield ".txt", graph_text(gm)
    if before is not None:
        yield ".diff", graph_diff(before, gm, (f"before {name}", f"after {name}"))
    if isinstance(gm, IterGraphModule):
        for part in ("setup", "main", "drain", "cleanup"):
            yield f"_{part}.txt", graph_text(getattr(gm, f"{part}_gm"))


def dump_of(settings: Settings) -> Dump | None:
    """Returns the callback that writes graphs, or None if they are not to be written."""
    if settings.dump_dir is None:
        return None
    return Dump(settings.dump_dir, required=settings.dump_required)
