"""Errors for passes that raised or were refused, and the files that reproduce them."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from graphopt import _compat
from graphopt.errors import GraphOptError, PassError, VerificationError
from graphopt.manager.callbacks import PassContext
from graphopt.manager.declaration import Pass
from graphopt.manager.edits import Edits
from graphopt.manager.options import PassArgumentError
from graphopt.manager.problems import Refused
from graphopt.manager.reproducers import reproducing_command
from graphopt.manager.text import Pipeline, is_text, marked_text
from graphopt.verify import Problem
from graphopt.verify.differences.difference import HINT
from graphopt.verify.problems import describe
from graphopt.verify.trials.numeric_trial import DIFFERENT

_SHOWN = 4
"""The number of problems shown after the first."""


def refusal(
    context: PassContext,
    refused: Refused,
    folder: Path,
    trial: str | None = None,
    made: Edits | None = None,
) -> VerificationError | PassError:
    """Builds the error for a refused pass. The graph must already be restored.

    Args:
        trial: what random inputs say of what the pass left.
        made: the nodes that the pass edited, which the first line names where another shows first
            that values differ.
        folder: for reproducers.
    """
    error_type = VerificationError if refused.broken else PassError
    head = f"pass {context.pass_.name!r} was refused: "
    problems = refused.problems
    if trial is not None and trial.startswith(DIFFERENT):
        problems = tuple(map(_without_declaration, problems))
    changed = None
    shown = problems[0].nodes[:1]
    if made is not None and made.names and shown and shown[0].name not in made.names:
        problems = (_with_edits(problems[0], made), *problems[1:])
        changed = f"\n{'':13}".join(made.lines)
    return error_type(_text(head, problems, context, folder, trial=trial, changed=changed))


def _with_edits(problem: Problem, made: Edits) -> Problem:
    """Adds to the first line about a problem which nodes the pass edited."""
    first, end, rest = problem.message.partition("\n")
    return replace(problem, message=f"{first} (the pass edited {made.said}){end}{rest}")


def _without_declaration(problem: Problem) -> Problem:
    """Drops the hint that a rule may be missing, for problems where the numbers are wrong."""
    return replace(problem, hint=None) if (problem.hint or "").endswith(HINT) else problem


def crash(context: PassContext, error: Exception, folder: Path) -> GraphOptError:
    """Builds the error for a pass that raised `error`. The graph must already be restored.

    An error of graphopt keeps its type, and any other becomes a `PassError`.
    """
    head, what, name = "raised ", _named(error), context.pass_.name
    if isinstance(error, PassArgumentError):
        head, what = "does not take this: ", str(error).strip()
    place = _place_in_pass(error, context.pass_)
    return _with_text(
        error, _text(f"pass {name!r} {head}", [Problem(what)], context, folder, place)
    )


@dataclass(frozen=True)
class StageAttempt:
    """The context of a stage that is about to run, for the error if it fails.

    Attributes:
        gm: the module of the graph.
        given: the derived graph, as it was before the first stage behind the passes.
        graph: its name; empty where there is but one graph.
        names: all stages of the list.
        done: those that ran on the graph, the one that is about to run included.
        folder: for reproducers.
    """

    gm: fx.GraphModule
    given: fx.Graph
    graph: str
    names: tuple[str, ...]
    done: tuple[str, ...]
    folder: Path

    @property
    def title(self) -> str:
        """The names of the stage and its graph."""
        return f"stage {self.done[-1]!r}" + (f" of {self.graph!r}" if self.graph else "")

    def lines(self) -> dict[str, str]:
        """Returns the lines of an error that locate the stage in the list."""
        marked = [f"[{name}]" if name == self.done[-1] else name for name in self.names]
        return {"stages:": " -> ".join(marked), "reproduce:": self._reproduce()}

    def _reproduce(self) -> str:
        gm = self.gm
        if gm.graph is not self.given:
            gm = _compat.lazy_graph_module(gm, self.given)
        stages = shlex.quote(" -> ".join(self.done))
        return reproducing_command(gm, self.folder, f"--stages {stages}")


def refusal_of_stage(refused: Refused, attempt: StageAttempt) -> VerificationError:
    """Builds the error for a refused stage."""
    head = f"{attempt.title} was refused: "
    return VerificationError(_layout(head, refused.problems, attempt.lines()))


def crash_of_stage(error: Exception, attempt: StageAttempt) -> GraphOptError:
    """Builds the error for a stage that raised `error`, as `crash` does."""
    head = f"{attempt.title} raised "
    return _with_text(error, _layout(head, [Problem(_named(error))], attempt.lines()))


def _named(error: Exception) -> str:
    text = str(error).strip()
    return type(error).__name__ + (f": {text}" if text else "")


def _with_text(error: Exception, full: str) -> GraphOptError:
    """Returns an error of graphopt's with another text; any other becomes a `PassError`."""
    if isinstance(error, GraphOptError):
        error.args = (full,)
        if str(error) == full:
            return error
    crashed = PassError(full)
    crashed.__cause__ = error
    return crashed


def _place_in_pass(error: Exception, pass_: Pass) -> str | None:
    """Returns the line of the pass's file that was running, or None."""
    file = pass_.source.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == file]
    return f"{_shown(Path(file))}:{lines[-1].lineno}  {lines[-1].line}" if lines else None


def _text(
    head: str,
    problems: Sequence[Problem],
    context: PassContext,
    folder: Path,
    place: str | None = None,
    trial: str | None = None,
    changed: str | None = None,
) -> str:
    pipeline = marked_text(context.pipeline, context.index)
    known = {"at:": place, "edited:": changed, "trial:": trial, "pipeline:": pipeline}
    return _layout(head, problems, {**known, "reproduce:": _reproduce(context, folder)})


def _layout(head: str, problems: Sequence[Problem], known: Mapping[str, str | None]) -> str:
    """Formats an error. `known` maps headings to what is known of the place."""
    first, *more = problems
    lines = [head + first.message]
    lines += _node_lines(first.nodes)
    lines += [f"  also: {problem.message}" for problem in more[:_SHOWN]]
    if len(more) > _SHOWN:
        lines.append(f"  and {len(more) - _SHOWN} more")
    said = {"at:": None, "from:": first.source, **known, "hint:": first.hint}
    for name, value in said.items():
        if value is not None:
            lines.append(f"  {name:<10} {value}")
    return "\n".join(lines)


def _node_lines(nodes: Sequence[fx.Node]) -> list[str]:
    """Formats nodes with their equal signs aligned."""
    parts = [describe(node).partition(" = ") for node in nodes]
    width = max((len(name) for name, equals, _ in parts if equals), default=0)
    texts = [f"{name:<{width}}{equals}{call}" for name, equals, call in parts]
    return [f"  {'>' if i == 0 else ' '} {text}" for i, text in enumerate(texts)]


def _reproduce(context: PassContext, folder: Path) -> str:
    step = Pipeline([context.pipeline[context.index]])
    options = f"--pipeline {shlex.quote(str(step))}{_import_option(context.pass_)}"
    return reproducing_command(context.gm, folder, options if is_text(step) else None)


def _import_option(pass_: Pass) -> str:
    """Returns the command-line option that makes a user's pass known."""
    file = Path(pass_.source.rpartition(":")[0])
    if pass_.module.startswith("graphopt.") or not file.is_file():
        return ""
    return f" --import {shlex.quote(str(_shown(file)))}"


def _shown(file: Path) -> Path:
    """Returns a path for display, relative to the current folder if it is inside."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
