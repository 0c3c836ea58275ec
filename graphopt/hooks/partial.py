"""Runs a pipeline on `torch.compile`'s graphs, each of which is only a part of a training step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat import hooks as _torch
from graphopt.errors import PipelineSyntaxError
from graphopt.ir.metadata import phase_of, provenance_of, set_phase, set_provenance
from graphopt.ir.operators import is_collective, is_wait
from graphopt.manager import Pass, PassCallback, PassContext, PassManager, Pipeline
from graphopt.manager.problems import Refused
from graphopt.manager.text import Step
from graphopt.stages import manager_for
from graphopt.verify import Problem

logger = logging.getLogger("graphopt")

AnyPipeline: TypeAlias = str | Pass | PassManager | Sequence[Any]

ON_ERROR = ("raise", "skip")
_KIND = "graphopt_graph"


def graph_kind(gm: fx.GraphModule) -> str | None:
    """The kind of `torch.compile`'s graph that a pass is given.

    Returns:
        "joint" (forward and backward in one), "forward", "backward" or "inference" (nothing needs
        a gradient). None for a whole training step, and for a graph that was given to Inductor
        without AOTAutograd.

    >>> graphopt.hooks.graph_kind(gm) is None  # the graph of a whole step
    True
    """
    kind: str | None = gm.meta.get(_KIND)
    return kind


class PartialManager(PassManager):
    """Runs the passes of a pipeline that apply to a part of a step.

    Args:
        pipeline, verify: see `graphopt.compile`.
        on_error: "raise" what a refused or failing pass raises, or "skip": warn, and leave out that
            pass and those after it.

    Attributes:
        skipped: names of the passes that are left out because they need a whole step.

    Raises:
        PipelineSyntaxError: the pipeline or a setting cannot be understood.
    """

    def __init__(
        self, pipeline: AnyPipeline, *, verify: str | None = None, on_error: str = "raise"
    ) -> None:
        if on_error not in ON_ERROR:
            raise PipelineSyntaxError(
                f"on_error={on_error!r}: one of {', '.join(ON_ERROR)} is expected"
            )
        given = manager_for([pipeline] if isinstance(pipeline, Pass) else pipeline, verify)
        self._registry = given._registry
        self._settings = given._settings
        self._callbacks = (*given._callbacks, _NumbersAreNodes())
        self.pipeline, self.skipped = _applicable(given.pipeline)
        self.on_error = on_error
        self.observed = bool(given._callbacks or given._settings.dump_dir)
        if self.skipped:
            level = logging.INFO if pipeline == "default" else logging.WARNING
            _say_skipped(str(given), self.skipped, level)

    @property
    def verify(self) -> str:
        """The level at which each pass is checked."""
        return self._settings.verify

    @property
    def enabled(self) -> Pipeline:
        """The passes that run, without disabled ones."""
        return Pipeline(self.pipeline[index] for index in self._enabled())

    def optimize(self, gm: fx.GraphModule, kind: str | None) -> None:
        """Applies the applicable passes to one of `torch.compile`'s graphs.

        Args:
            kind: the kind that `graph_kind` returns meanwhile.
        """
        gm.meta = {**gm.meta, _KIND: kind}
        for node in gm.graph.nodes:
            set_provenance(node, provenance_of(node) or ("capture",))
            if node.op == "call_function":
                set_phase(node, _phase_in_part(node, kind))
        try:
            self.run(gm)
        except Exception as error:
            if self.on_error == "raise":
                raise
            logger.warning("torch.compile goes on without a pass: %s", error)


def _phase_in_part(node: fx.Node, kind: str | None) -> str | None:
    """The phase of a node in a graph of that kind; without gradients it may be the optimizer's."""
    if kind not in ("forward", "backward", "joint"):
        return phase_of(node)
    if is_collective(node) or is_wait(node):
        return "communication"
    return _torch.phase_in_joint_graph(node) if kind == "joint" else kind


def _applicable(pipeline: Pipeline) -> tuple[Pipeline, tuple[str, ...]]:
    """The passes that need no whole step, themselves or by prerequisite, and the names of the
    others."""
    kept: list[Step] = []
    skipped: dict[str, None] = {}
    for step in pipeline:
        pass_ = step.pass_
        if pass_.whole_step or not skipped.keys().isdisjoint(pass_.prerequisites):
            skipped[pass_.name] = None
        else:
            kept.append(step)
    return Pipeline(kept), tuple(skipped)


@cache
def _say_skipped(pipeline: str, names: tuple[str, ...], level: int) -> None:
    """Logs the skipped passes, once for each pipeline."""
    logger.log(
        level,
        "left out inside torch.compile, whose graphs are parts of a training step: %s"
        "\n  pipeline:  %s\n  hint:      graphopt.compile captures whole steps",
        ", ".join(names),
        pipeline,
    )


class _NumbersAreNodes(PassCallback):
    """Refuses a pass that puts a symbolic size into a node's arguments other than as a node."""

    def after_pass(self, context: PassContext) -> None:
        for node in context.before.new_nodes():
            leaves = _compat.tree_leaves((node.args, node.kwargs))
            if any(isinstance(leaf, _SYMBOLIC) for leaf in leaves):
                problem = Problem(
                    "it wrote a size that is not known while compiling into a node",
                    (node,),
                    hint="leave dynamic shapes alone, or compute the size by a node"
                    " (aten.sym_size.int)",
                )
                raise Refused([problem])


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
