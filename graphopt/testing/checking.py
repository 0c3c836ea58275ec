"""`check_pass`: the checks that every pass's test should make, in one call."""

from __future__ import annotations

import copy
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import eliminate_dead_code
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import Pass, PassManager, PassRecord, default_registry, discovery
from graphopt.manager.edits import edits
from graphopt.readable import compact_text, text_diff
from graphopt.testing.comparing import Values, difference, wide
from graphopt.testing.experiments import Experiment, Experiments, as_given
from graphopt.testing.factors import typical
from graphopt.testing.numerics import TOLERANCE as TOLERANCE
from graphopt.testing.numerics import numeric_problems
from graphopt.testing.runs import run
from graphopt.testing.substitution import Substitution
from graphopt.testing.tested_graph import Passes, graph_and_inputs, prepared

UPDATE = "GRAPHOPT_UPDATE_GOLDEN"
"""The environment variable that, set to 1, makes `check_pass` write golden files."""

_ITERATIONS = 3


def check_pass(
    step: Callable[..., Any] | fx.GraphModule,
    args: Sequence[Any],
    pass_: Pass | str,
    *,
    expect: str | Path | None = None,
    changes: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    warm: bool = True,
    idempotent: bool = True,
    may_change_nothing: bool = False,
    after: Passes = (),
    **options: Any,
) -> PassRecord:
    """Tests a pass on one training step, without changing its arguments.

    The pass runs under a `PassManager`, verification included. The passes of `after` and
    prerequisites that the graph lacks run first, and what they leave is the untouched graph below.
    Then

    - its number of changes is compared with `changes`, and the graph with `expect`;
    - both graphs, untouched and rewritten, run on copies of the same inputs. What they return and
      what they leave in the inputs must be the same bit for bit. Of a pass that is declared to
      change numerics, rounding is told from mistakes, in many runs with other data and other
      hyperparameters: see `graphopt.testing.numerics`. If nodes run one iteration
      late, three iterations and a flush are compared, each with smaller hyperparameters and a batch
      rolled by one;
    - in `fake_ranks`, both run for all ranks, each with a batch of its own, and what was the same
      on all ranks has to stay so;
    - the function of the pass runs once more, and must find nothing left to do;
    - a pass that has changed nothing has not been tested, and fails.

    `StepUnderTest` captures a step once for several checks.

    Args:
        step: a training step, which is captured; or a graph module.
        args: positional arguments of the step; or the inputs of the graph.
        pass_: a pass or the name of one.
        expect: the rewritten graph as `graphopt.readable.compact_text`, indented or not; or a file
            that holds it. With the environment variable GRAPHOPT_UPDATE_GOLDEN=1 such files are
            written.
        changes: how many changes the pass reports.
        kwargs: keyword arguments of the step.
        warm: see `StepUnderTest`.
        idempotent: whether a second run has to find nothing to do.
        may_change_nothing: whether a pass is tested that leaves the graph as it was; `changes=0`
            says so as well.
        after: a pipeline that runs first, such as prerequisites with options of their own.
        **options: options of the pass.

    Raises:
        AssertionError: something is not as it should be; the message shows what.
        GraphOptError: the step cannot be captured, or the pass raises or is refused.

    >>> def train_step(model, x):
    ...     model(x).sum().backward()
    >>> arguments = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> graphopt.testing.check_pass(train_step, arguments, "schedule_comm_wait", changes=0).changed
    False
    """
    return StepUnderTest(step, args, kwargs, warm=warm).check(
        pass_,
        expect=expect,
        changes=changes,
        idempotent=idempotent,
        may_change_nothing=may_change_nothing,
        after=after,
        **options,
    )


class StepUnderTest:
    """A training step, captured once, for tests of several passes.

    Args:
        step, args, kwargs: as of `check_pass`. They are not used any more afterwards: a step is
            captured with the state that it has now.
        warm: capture the step as all calls but the first run it: with optimizer state among its
            inputs. Where that is not there yet, the step runs once, on copies of model and
            optimizer; if they are no arguments of it, the state is that before the first step.
            False: as the first call, which makes that state.

    Raises:
        GraphOptError: the step cannot be captured.

    >>> def train_step(model, x):
    ...     model(x).sum().backward()
    >>> arguments = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> step = graphopt.testing.StepUnderTest(train_step, arguments)
    >>> step.check("schedule_comm_wait").changed
    False
    """

    def __init__(
        self,
        step: Callable[..., Any] | fx.GraphModule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        warm: bool = True,
    ) -> None:
        self._untouched, self._inputs = graph_and_inputs(step, args, kwargs or {}, warm)
        self._runs: dict[tuple[Any, ...], Values] = {}

    @property
    def graph_module(self) -> fx.GraphModule:
        """Returns a copy of the untouched graph."""
        return copy.deepcopy(self._untouched)

    @property
    def inputs(self) -> list[Any]:
        """Returns copies of the graph's inputs, one per placeholder."""
        return copy.deepcopy(self._inputs)

    def check(
        self,
        pass_: Pass | str,
        *,
        expect: str | Path | None = None,
        changes: int | None = None,
        idempotent: bool = True,
        may_change_nothing: bool = False,
        after: Passes = (),
        **options: Any,
    ) -> PassRecord:
        """Tests one pass as `check_pass` does."""
        discovery.install()
        found = default_registry().get(pass_) if isinstance(pass_, str) else pass_
        untouched, prepared_by = prepared(self._untouched, found, after)
        rewritten = copy.deepcopy(untouched)
        (record,) = PassManager([(found, options)]).run(rewritten)
        if changes is not None and record.changes != changes:
            raise AssertionError(f"{found.name} reports {record.changes} changes, not {changes}")
        if expect is not None:
            _compare_text(compact_text(rewritten), expect, found.name)
        self._compare_runs(untouched, rewritten, found, prepared_by)
        if idempotent:
            _run_again(rewritten, found, options)
        if not record.changed and changes != 0 and expect is None and not may_change_nothing:
            raise AssertionError(_changed_nothing(found, record))
        return record

    def _compare_runs(
        self,
        untouched: fx.GraphModule,
        rewritten: fx.GraphModule,
        pass_: Pass,
        prepared_by: tuple[Any, ...],
    ) -> None:
        late = isinstance(rewritten, IterGraphModule) and bool(rewritten.graph.late)
        iterations = _ITERATIONS if late else 1

        def run_untouched(experiment: Experiment) -> Values:
            return self._run(untouched, iterations, prepared_by, experiment)

        def run_rewritten(graph: fx.GraphModule, experiment: Experiment) -> Values:
            try:
                return run(graph, experiment.make(), iterations)
            except Exception as error:
                raise AssertionError(
                    f"the graph that {pass_.name} leaves fails when it runs:"
                    f" {type(error).__name__}: {error}"
                ) from error

        first = as_given(self._inputs)
        expected, actual = run_untouched(first), run_rewritten(rewritten, first)
        if expected.keys() != actual.keys():
            raise AssertionError(
                f"{pass_.name} changes what the graph returns: {list(actual)} instead of"
                f" {list(expected)}"
            )
        _compare_ranks(expected, actual, pass_.name)
        if pass_.changes_numerics:
            experiments = Experiments(untouched.graph.find_nodes(op="placeholder"), self._inputs)
            graphs = Substitution(
                untouched,
                rewritten,
                lambda graph, experiment: run(graph, experiment.make(), iterations),
                run_rewritten,
                run_untouched,
            )
            problems = numeric_problems(experiments, expected, run_untouched, graphs)
        else:
            problems = _differences(expected, actual)
        for where, problem in problems:
            made = edits(untouched.graph, rewritten.graph)
            lines = [f"\n  the pass edited {made.said}:", *made.lines] if made.names else []
            hint = _factor_hint(expected, actual) + "\n    ".join(lines)
            raise AssertionError(f"{pass_.name} changes {where}: {problem}{hint}")

    def _run(
        self,
        untouched: fx.GraphModule,
        iterations: int,
        prepared_by: tuple[Any, ...],
        experiment: Experiment,
    ) -> Values:
        """Runs the untouched graph, with the results cached for the next check."""
        key = iterations, prepared_by, experiment.name, _compat.fake_world_size()
        if key in self._runs:
            return self._runs[key]
        found = run(untouched, experiment.make(), iterations)
        if experiment.is_kept:
            self._runs[key] = found
        return found


def _changed_nothing(pass_: Pass, record: PassRecord) -> str:
    """Returns a message that a check is void, and why the pass may have found nothing to do."""
    note = f": {record.note}" if record.note else ""
    return (
        f"{pass_.name} changed nothing in this step{note}\n  hint: give it a step in which it finds"
        " something; changes=0 or may_change_nothing=True, if it is to find nothing"
    )


def _differences(expected: Values, actual: Values) -> Iterator[tuple[str, str]]:
    for where, value in expected.items():
        problem = difference(actual[where], value)
        if problem is not None:
            yield where, problem


def _factor_hint(expected: Values, actual: Values) -> str:
    """Returns a hint at the likely mistake if a value is a multiple of the expected one."""
    ranks = _compat.fake_world_size() or 1
    for where, value in expected.items():
        if not isinstance(value.value, torch.Tensor) or not value.value.is_floating_point():
            continue
        factor = typical(wide(value.change), wide(actual[where].change))
        if factor is None:
            continue
        what = f"\n  {where} changes by {factor:.3g} times as much as it did"
        if ranks > 1 and _is_near(factor * ranks, factor * ranks**2):  # squares go by squares
            return f"{what}: an average over {ranks} ranks is divided by {ranks} twice?"
        if ranks > 1 and _is_near(factor / ranks, factor / ranks**2):
            return f"{what}: a sum over {ranks} ranks that is not divided, or is made twice?"
        return what
    return ""


def _is_near(*factors: float) -> bool:
    return any(abs(factor - 1) < _NEAR for factor in factors)


_NEAR = 0.05
"""The relative distance within which a factor is taken for a meaningful one, such as the number of
ranks."""


def _compare_ranks(expected: Values, actual: Values, name: str) -> None:
    """Checks that values equal on all ranks before are still equal."""
    for where, value in expected.items():
        head, _, rank = where.partition(" on rank ")
        first = f"{head} on rank 0"
        if not rank or where == first or difference(value, expected[first]) is not None:
            continue
        problem = difference(actual[where], actual[first])
        if problem is not None:
            raise AssertionError(
                f"{name} lets ranks differ: {head} is not the same on ranks 0 and {rank} any more"
                f" ({problem}): does each rank use its own gradient in place of the average?"
            )


def _compare_text(actual: str, expect: str | Path, name: str) -> None:
    if isinstance(expect, Path):
        if os.environ.get(UPDATE) == "1":
            expect.parent.mkdir(parents=True, exist_ok=True)
            expect.write_text(actual)
        if not expect.is_file():
            raise AssertionError(f"{expect} does not exist; {UPDATE}=1 writes it")
        where, expected = str(expect), expect.read_text()
    else:
        where, expected = "expected", textwrap.dedent(expect).strip("\n") + "\n"
    changed = text_diff(expected, actual, (where, "actual"))
    if changed:
        hint = f"\n{UPDATE}=1 writes the file anew" if isinstance(expect, Path) else ""
        raise AssertionError(f"the graph after {name} is not as expected\n{changed}{hint}")


def _run_again(rewritten: fx.GraphModule, pass_: Pass, options: Mapping[str, Any]) -> None:
    again = copy.deepcopy(rewritten)
    before = compact_text(again)
    changes = pass_.function(again, **options)
    eliminate_dead_code(again.graph)
    changed = text_diff(before, compact_text(again), ("after one run", "after two runs"))
    hint = "\nidempotent=False, if it is meant to"
    if changed:
        raise AssertionError(
            f"a second run of {pass_.name} changes the graph again{hint}\n{changed}"
        )
    if changes:
        raise AssertionError(
            f"a second run of {pass_.name} reports {changes} changes, but the graph is the same"
        )
