"""`PassManager`: runs a pipeline on a graph; checks, times and records each pass."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx

from graphopt import _compat
from graphopt.comm.waits import split_waits
from graphopt.errors import PipelineSyntaxError
from graphopt.graph_utils import eliminate_dead_code
from graphopt.ir.metadata import PROVENANCE, provenance_of
from graphopt.ir.positions import give_by_position
from graphopt.ir.rewritten_places import forget_places
from graphopt.manager.admission import check_graph_module, check_iterations, check_open
from graphopt.manager.callbacks import PassCallback, PassContext, Timing, Verification, dump_of
from graphopt.manager.declaration import Pass
from graphopt.manager.differences import difference
from graphopt.manager.edits import edits
from graphopt.manager.failures import crash, refusal
from graphopt.manager.notes import collected
from graphopt.manager.options import bind
from graphopt.manager.order import check_order
from graphopt.manager.problems import Refused, refusing_errors
from graphopt.manager.records import (
    Counts,
    PassRecord,
    add_record,
    applied_passes,
    count,
    recorded_arguments,
)
from graphopt.manager.registry import PassRegistry, default_registry
from graphopt.manager.reproducers import reproducer_folder
from graphopt.manager.settings import Settings, read_settings
from graphopt.manager.snapshot import Snapshot
from graphopt.manager.text import Pipeline, Step, parse_pipeline
from graphopt.manager.wellformed import find_problem
from graphopt.ranks.spmd import launches_digest
from graphopt.runtime.memory import collector_paused
from graphopt.schedule.program import step_peak_bytes
from graphopt.verify import Problem
from graphopt.verify.equivalence import Proof
from graphopt.verify.trials.numeric_trial import module_of, verdict

PipelineEntry: TypeAlias = str | Pass | tuple[str | Pass, Mapping[str, Any]]


class PassManager:
    """Runs the passes of a pipeline on graphs, in order.

    Each pass either leaves a graph that was checked, or raises, and then the graph is as it was
    before that pass; passes before it stay applied. `str` of a manager is its pipeline as text.

    Args:
        pipeline: "default" or "none", as `graphopt.compile` has them, text, a pass, a list of
            passes, names and ``(pass or name, options)`` pairs, or another manager, whose passes
            are taken over.
        verify: "off", "dependencies" or "equivalence" (the default): what is checked after each
            pass.
        dump_dir: folder in which the graph is written after each pass.
        disable: passes that are left out, by exact name.
        stop_after: run only this many passes; to find the one that is to blame.
        registry: where names are looked up; None: all declared passes.
        callbacks: called around each pass, outside of timing, verification and dumps.

    Where `verify`, `dump_dir`, `disable` or `stop_after` are not given, the environment variables
    GRAPHOPT_VERIFY, GRAPHOPT_DUMP, GRAPHOPT_DISABLE and GRAPHOPT_STOP_AFTER are read, here.

    Raises:
        PipelineSyntaxError: the pipeline or a setting cannot be understood.
        PassArgumentError: a pass has no such option, or it takes other values.

    >>> import graphopt, torch
    >>> manager = graphopt.PassManager("comm_fusion_with_concat(bucket_size_mb=5)", verify="off")
    >>> str(manager)
    'comm_fusion_with_concat(bucket_size_mb=5)'
    >>> captured = graphopt.capture(lambda m, x: m(x), torch.nn.ReLU(), torch.ones(2))
    >>> (record,) = manager.run(captured.graph_module)
    >>> record.changes
    0
    """

    def __init__(
        self,
        pipeline: str | Pass | PassManager | Sequence[PipelineEntry],
        *,
        verify: str | None = None,
        dump_dir: str | os.PathLike[str] | None = None,
        disable: Iterable[str | Pass] = (),
        stop_after: int | None = None,
        registry: PassRegistry | None = None,
        callbacks: Iterable[PassCallback] = (),
    ) -> None:
        self._registry = default_registry() if registry is None else registry
        self.pipeline = _read_pipeline(pipeline, self._registry)
        self._settings = read_settings(
            verify=verify,
            dump_dir=dump_dir,
            disable=disable,
            stop_after=stop_after,
            known=lambda: {*self._registry.names(), *(s.pass_.name for s in self.pipeline)},
        )
        self._callbacks = tuple(callbacks)

    def __str__(self) -> str:
        return str(self.pipeline)

    def __repr__(self) -> str:
        return f"PassManager({str(self)!r})"

    def with_pipeline(self, pipeline: Sequence[PipelineEntry]) -> PassManager:
        """Returns a manager of another pipeline, with the same settings and callbacks."""
        other = copy.copy(self)
        other.pipeline = _read_pipeline(pipeline, self._registry)
        return other

    @property
    def settings(self) -> Settings:
        """The settings for running passes and stages."""
        return self._settings

    def check_order(self, applied: Sequence[str] = ()) -> None:
        """Checks that the passes may run in this order, before there is a graph.

        Args:
            applied: passes that a graph will have had.

        Raises:
            PassOrderError: a prerequisite is missing, or a pass comes too late or twice.
        """
        passes = [self.pipeline[index].pass_ for index in self._enabled()]
        check_order(passes, applied, self._registry, self._settings.disable)

    def run(self, gm: fx.GraphModule, proof: Proof | None = None) -> list[PassRecord]:
        """Applies the pipeline to a graph module, in place.

        Args:
            proof: takes what is shown of the graph, for whoever goes on with it.

        Returns:
            A record per pass that ran; `applied_passes` has their names.

        Raises:
            PassArgumentError: `gm` is not a graph module.
            PassOrderError: the passes may not be applied to this graph; nothing is changed.
            PassError: a pass raised something else than an error of graphopt.
            VerificationError: a pass left a broken graph, or one that means something else.
            IterationError: one of the passes needs an `IterGraphModule`; nothing is changed.
            GraphOptError: of another type, that a pass raised.
        """
        check_graph_module(gm)
        # Graphs are cycles: what Python's collector would free meanwhile is not worth the looking.
        with collector_paused(), _compat.without_fake_mode():
            return self._run(gm, proof)

    def _run(self, gm: fx.GraphModule, proof: Proof | None) -> list[PassRecord]:
        indices = self._enabled()
        if not indices:
            return []
        check_open(gm)
        check_iterations(gm, self.pipeline, indices)
        self.check_order(applied_passes(gm))
        callbacks = self._all_callbacks(proof)
        forget_places(gm.graph)
        if split_waits(gm.graph) + give_by_position(gm.graph):
            gm.recompile()
        before = Snapshot(gm)
        records = []
        counts, peak = count(gm.graph), step_peak_bytes(gm.graph)
        for index in indices:
            context = self._context(gm, index, before, counts)
            context.record.peak_bytes_before = peak
            self._apply(context, callbacks)
            counts, peak = context.record.after, context.record.peak_bytes_after
            records.append(context.record)
            if context.record.changed and index != indices[-1]:
                before = Snapshot(gm)
            else:
                before.note_attributes()
        return records

    def _enabled(self) -> list[int]:
        disabled = self._settings.disable
        indices = [i for i, step in enumerate(self.pipeline) if step.pass_.name not in disabled]
        return indices[: self._settings.stop_after]

    def _all_callbacks(self, proof: Proof | None) -> list[PassCallback]:
        level, dump = self._settings.verify, dump_of(self._settings)
        verification = [Verification(level, proof)] if level != "off" else []
        return [*self._callbacks, *filter(None, [dump]), *verification, Timing()]

    def _context(
        self, gm: fx.GraphModule, index: int, before: Snapshot, counts: Counts
    ) -> PassContext:
        pass_, options = self.pipeline[index]
        arguments = bind(pass_.options, options, pass_.name)
        record = PassRecord(
            pass_.name, recorded_arguments(arguments), changes_numerics=pass_.changes_numerics
        )
        record.before = counts
        return PassContext(gm, pass_, arguments, self.pipeline, index, before, record)

    def _apply(self, context: PassContext, callbacks: Sequence[PassCallback]) -> None:
        try:
            for callback in callbacks:
                callback.before_pass(context)
            _call(context)
            with refusing_errors():
                _settle(context)
            checked = _content(context.gm) if self._callbacks else []
            for callback in reversed(callbacks):
                callback.after_pass(context)
            _refuse_edits(context, checked, self._callbacks)
            forget_places(context.gm.graph)
        except BaseException as error:
            tried = _trial(context, error) if isinstance(error, Refused) else None
            of_values = isinstance(error, Refused) and error.of_values
            made = edits(context.before.graph, context.gm.graph) if of_values else None
            context.before.restore()
            for callback in reversed(callbacks):
                callback.failed(context, error)
            folder = reproducer_folder(self._settings.dump_dir)
            if isinstance(error, Refused):
                raise refusal(context, error, folder, tried, made) from error.__cause__
            if isinstance(error, _Raised):
                raised = crash(context, error.cause, folder)
                raise raised from raised.__cause__
            raise


class _Raised(Exception):
    """Wraps the exception `cause` that a pass raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


def _trial(context: PassContext, refused: Refused) -> str | None:
    """Returns the verdict of a numeric trial on random inputs for a refused graph, or None."""
    if not refused.broken or context.pass_.changes_numerics or not context.before.annotated:
        return None
    before = module_of(context.gm, context.before.graph)
    return verdict(before, context.gm, of_values=refused.of_values)


def run_alone(
    pass_: Pass, gm: fx.GraphModule, options: Mapping[str, Any], registry: PassRegistry
) -> PassRecord:
    """Runs a pass that is called directly. A disabled pass does not run, and its record says so."""
    manager = PassManager([(pass_, options)], registry=registry)
    records = manager.run(gm)
    if records:
        return records[0]
    record = PassRecord(pass_.name, changes_numerics=pass_.changes_numerics, skipped=True)
    record.before = record.after = count(gm.graph)
    return record


def _call(context: PassContext) -> None:
    """Runs the function of a pass and records its return value."""
    try:
        with collected() as notes:
            changes = context.pass_.function(context.gm, **context.arguments)
    except Exception as error:
        raise _Raised(error) from error
    context.record.note = "\n".join(notes)
    if changes is None or (type(changes) is int and changes >= 0):
        context.record.changes = changes
        return
    returned = "a graph module" if isinstance(changes, fx.GraphModule) else repr(changes)
    hint = "a pass edits gm.graph in place, and returns how many changes it made, or nothing"
    raise Refused([Problem(f"it returned {returned}", hint=hint)], broken=False)


def _settle(context: PassContext) -> None:
    """Checks and cleans up the graph that a pass has left, and completes the record."""
    gm, before, record = context.gm, context.before, context.record
    give_by_position(gm.graph)
    untouched = before.unchanged()
    found = None if untouched else find_problem(gm, before)
    if found is not None:
        raise Refused([found])
    inserted = [] if untouched else [node.name for node in before.new_nodes()]
    removed = eliminate_dead_code(gm.graph)
    again = bool(removed) and not untouched  # what was put in may be what was taken out
    record.changed = not before.unchanged() if again else bool(removed) or not untouched
    if inserted and record.changes and not record.changed:
        _refuse_unread(context, inserted)
    if record.changed:
        for node in before.new_nodes():
            made_by = (*provenance_of(node), record.name)
            node.meta = {**node.meta, PROVENANCE: made_by}
        gm.recompile()
        context.changed = before.changed_nodes()
        record.difference = difference(before, gm, record.name, context.changed)
    record.after = count(gm.graph) if record.changed else record.before
    record.peak_bytes_after = record.peak_bytes_before
    if record.changed:
        record.peak_bytes_after = step_peak_bytes(gm.graph)
    record.launches = launches_digest(gm.graph)
    add_record(gm, record)


def _content(gm: fx.GraphModule) -> list[Any]:
    """Returns the contents of a graph for comparison by identity; arguments are immutable."""
    return [part for n in gm.graph.nodes for part in (n, n.target, n.args, n.kwargs)]


def _refuse_edits(
    context: PassContext, checked: Sequence[Any], callbacks: Sequence[PassCallback]
) -> None:
    """Refuses callbacks that edited the graph after it was checked."""
    now = _content(context.gm) if callbacks else []
    if len(now) == len(checked) and all(map(operator.is_, now, checked)):
        return
    names = ", ".join(type(callback).__name__ for callback in callbacks)
    problem = Problem(
        f"a callback has edited the graph that the pass has left, after it was checked: {names}",
        hint="callbacks look at a graph; what edits it is a pass",
    )
    raise Refused([problem], broken=False)


def _refuse_unread(context: PassContext, inserted: Sequence[str]) -> None:
    """Refuses a pass all of whose new nodes are dead code."""
    count = context.record.changes
    problem = Problem(
        f"it reports {count} change{'s' * (count != 1)}, but nobody reads %{inserted[0]}, which it"
        " put in, so that nothing is left of them",
        hint="let a node read it; graphopt.host.insert_callback(graph, function, *nodes) gives"
        " values of every step to a function, and stays",
    )
    raise Refused([problem], broken=False)


def _read_pipeline(pipeline: object, registry: PassRegistry) -> Pipeline:
    if isinstance(pipeline, str) and pipeline in registry.pipelines:
        pipeline = registry.pipelines[pipeline]()
    if isinstance(pipeline, str):
        return parse_pipeline(pipeline, registry)
    if isinstance(pipeline, PassManager):
        return pipeline.pipeline
    entries = [pipeline] if isinstance(pipeline, Pass) else pipeline
    if not isinstance(entries, (list, tuple)):
        raise PipelineSyntaxError(
            f"{pipeline!r} is not a pipeline: give text, passes, or a list of passes"
            + _decorate(pipeline)
        )
    steps = Pipeline([step for entry in entries for step in _steps(entry, registry)])
    registry.check_known([step.pass_ for step in steps])
    return steps


def _steps(entry: object, registry: PassRegistry) -> Sequence[Step]:
    if isinstance(entry, Step):
        return [entry]
    if isinstance(entry, str):
        return parse_pipeline(entry, registry)
    if isinstance(entry, Pass):
        entry = (entry, {})
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Mapping):
        first, options = entry
        pass_ = registry.get(first) if isinstance(first, str) else first
        if isinstance(pass_, Pass):
            bind(pass_.options, options, pass_.name)
            return [Step(pass_, dict(options))]
    raise PipelineSyntaxError(
        f"{entry!r} is neither a pass nor a name nor a pair of one and its options"
        + _decorate(entry)
    )


def _decorate(value: object) -> str:
    return "; decorate it with @graph_optimization_pass()" if callable(value) else ""
