"""Implementation of `graphopt bisect`, which finds the pass that breaks a graph."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import fx

from graphopt.commands.errors import FAILED, reported
from graphopt.commands.imports import import_passes
from graphopt.errors import GraphOptError
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import PassManager
from graphopt.saved import load_graph, save_graph
from graphopt.stages import manager_for
from graphopt.verify import Problem, check_equivalence

Check = Callable[[int], "str | None"]
"""Whether so many passes, first to last, are too many: what is wrong then, or None."""


@dataclass(frozen=True)
class Culprit:
    """The first pass after which a check fails, and the failure.

    Attributes:
        count: passes of the pipeline with which it fails; 0: it fails without any.
        message: the failure of the check.
    """

    count: int
    message: str


def first_failure(passes: int, check: Check) -> Culprit | None:
    """The smallest number of passes with which `check` fails, by bisection.

    A check that fails with some number of passes is taken to fail with more. It is asked about all
    of them first, about none of them next, and then about one more than log2(passes) times.

    Returns:
        None where it does not fail with all of them.
    """
    messages: dict[int, str] = {}

    def fails(count: int) -> bool:
        message = check(count)
        if message is not None:
            messages[count] = message
        return message is not None

    if not fails(passes):
        return None
    count = 0 if fails(0) else bisect_left(range(passes), True, lo=1, key=fails)
    return Culprit(count, messages[count])


def run_bisect(
    pipeline: str,
    *,
    file: Path | None,
    modules: Sequence[str],
    command: Sequence[str],
    out: Path | None,
) -> None:
    """Prints the first pass of `pipeline` after which a saved graph computes something else, or
    with which a command fails.

    The graph is all that is needed for the former: no ranks, model or GPU.
    """
    console = Console()
    with reported("bisect"):
        import_passes(modules)
        graph = None if file is None else _loaded(file, pipeline)
        manager = manager_for(pipeline, None)
        names = [step.pass_.name for step in PassManager(manager).pipeline]
        check = command_check(command) if command else graph_check(graph, manager)
    with reported("bisect", FAILED):
        culprit = first_failure(len(names), check)
    if culprit is None:
        console.print(f"nothing fails with all {len(names)} passes", highlight=False)
        return
    if culprit.count == 0:
        console.print(f"it fails without any pass: {culprit.message}", markup=False)
        return
    name = names[culprit.count - 1]
    console.print(f"pass {culprit.count} of {len(names)}, {name}, is the first that makes it fail:")
    console.out(culprit.message, highlight=False)
    if graph is not None and out is not None:
        PassManager(manager, verify="off", stop_after=culprit.count - 1).run(graph)
        with reported("bisect"):
            save_graph(graph, out)
        console.out(f"the graph before it: {out}", highlight=False)
        reproduced = f"graphopt optimize {out} --pipeline {name}"
        console.out(f"reproduce:           {reproduced}", highlight=False)


def _loaded(file: Path, pipeline: str) -> fx.GraphModule:
    graph = load_graph(file)
    if pipeline == "default" and not isinstance(graph, IterGraphModule):
        return IterGraphModule(graph)
    return graph


def graph_check(graph: fx.GraphModule | None, pipeline: PassManager) -> Check:
    """A check that a prefix of the passes leaves the graph equivalent."""
    if graph is None:
        raise GraphOptError("give a saved graph, or a command behind `--`")

    def check(count: int) -> str | None:
        late = isinstance(graph, IterGraphModule)
        rewritten = IterGraphModule(graph) if late else _copied(graph)
        try:
            PassManager(pipeline, verify="off", stop_after=count).run(rewritten)
        except GraphOptError as error:
            return str(error)
        report = check_equivalence(graph, rewritten)
        return None if report.ok else _text(report.problems)

    return check


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copied)


def _text(problems: Sequence[Problem]) -> str:
    more = f"\n... and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def command_check(command: Sequence[str]) -> Check:
    """A check that runs a command with each `PassManager` stopped after a prefix of the passes."""

    def check(count: int) -> str | None:
        environment = {**os.environ, "GRAPHOPT_STOP_AFTER": str(count)}
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                list(command), env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        print(f"{count} passes: exit status {done.returncode}", file=sys.stderr)
        return None if done.returncode == 0 else "\n".join(lines[-5:]) or "it fails"

    return check
