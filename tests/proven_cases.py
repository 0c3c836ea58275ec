"""Training loops of the coverage set, taken through all passes and stages: is each step proven?

A loop is captured as it is in its second call, for a number of ranks (of a group in which nothing
is communicated) and a way in which optimizers go through their parameters, and taken through the
default pipeline and the stages behind it, which are verified at level "equivalence". It is *proven*
if nothing was refused and no graph was left without a comparison; *not decided* if terms could not
speak of some graph; *not proven* if a pass or a stage was refused; *not captured* if there is no
graph at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from cases import Build, Case
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt.errors import GraphOptError, PassError, VerificationError
from graphopt.iter_graph import copy_graph
from graphopt.manager import records_of
from graphopt.parallel import Parallel, resolve
from graphopt.parallel.markers import markers_of
from graphopt.parallel.parallelize import parallelize
from graphopt.stages import default_pipeline
from graphopt.stages.compiling import Stages
from graphopt.tracing.call import Call
from graphopt.tracing.capture import capture_call, communication_for
from graphopt.tracing.captured_step import CapturedStep

RANKS = (1, 2, 4)
OPTIMIZERS = ("fused", "foreach", "loop")


@dataclass
class Outcome:
    """What became of one case on some ranks.

    Attributes:
        verdict: "proven", "not decided", "not proven", "not captured" or "failed".
        reason: of any but the first.
        stages: how many passes and stages have left a graph, of all captures.
    """

    name: str
    ranks: int
    optimizers: str
    verdict: str
    reason: str = ""
    stages: int = 0


class Undecided(logging.Handler):
    """Collects what the log says of graphs that were not compared."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "not compared" in text or "not decided" in text or "to be compared" in text:
            self.lines.append(text)


class Captures:
    """What the combinations of one case share.

    What is outside the optimizers is traced a second time, to see that nothing else decides it,
    for the first way through the parameters alone. A capture says of the ranks how many there are,
    in its markers, and nothing else: one for several ranks serves for every number of them.
    """

    def __init__(self) -> None:
        self._of_several: dict[str, tuple[Case, CapturedStep]] = {}

    def step(self, build: Build, ranks: int, optimizers: str) -> CapturedStep:
        """A capture of the second call, with markers, for as many ranks as there are now."""
        if ranks == 1:
            return self._captured(build, graphopt.Manual())[1]
        if optimizers not in self._of_several:
            self._of_several[optimizers] = self._captured(build, graphopt.DataParallel())
        _, captured = self._of_several[optimizers]
        graph, _ = copy_graph(captured.graph_module.graph)
        named = communication_for(resolve(captured.parallel))
        assert named is not None
        for marker in markers_of(graph):
            marker.args = (*marker.args[:2], named.group.ranks, named.group.name)
        return replace(captured, graph_module=fx.GraphModule(captured.graph_module, graph))

    def _captured(self, build: Build, parallel: Parallel) -> tuple[Case, CapturedStep]:
        torch.manual_seed(0)
        case = build()
        case.step(*case.calls[0])  # optimizers make their state
        communication = communication_for(resolve(parallel))
        return case, capture_call(Call(case.step, case.calls[1], {}), communication)


def judged(
    name: str, build: Build, ranks: int, optimizers: str, captures: Captures | None = None
) -> Outcome:
    """Take a case through all passes and stages.

    Args:
        captures: those of this case that other combinations have made.
    """
    logger, undecided = logging.getLogger("graphopt"), Undecided()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(undecided)
    outcome = Outcome(name, ranks, optimizers, "proven")
    try:
        with group_of(ranks), looping_as(optimizers):
            captured = (captures or Captures()).step(build, ranks, optimizers)
            outcome.stages = _stages_run(captured)
    except (VerificationError, PassError) as error:
        outcome.verdict, outcome.reason = "not proven", str(error)
    except GraphOptError as error:
        outcome.verdict, outcome.reason = "not captured", f"{type(error).__name__}: {error}"
    except Exception as error:
        outcome.verdict, outcome.reason = "failed", f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(undecided)
    if outcome.verdict == "proven" and undecided.lines:
        outcome.verdict, outcome.reason = "not decided", "; ".join(dict.fromkeys(undecided.lines))
    return outcome


def _stages_run(captured: CapturedStep) -> int:
    parallelize(captured.graph_module, captured.parallel)
    stages = Stages(graphopt.PassManager(default_pipeline()), None)
    step = stages.apply_passes(captured)
    stages.derive(step)
    stages.make_executable(step)
    records = records_of(captured.graph_module)
    return sum(record.changed or record.stage for record in records)


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """A group of so many ranks, of which this process is the first; none for a single one."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        if ranks > 1:
            dist.destroy_process_group()


@contextmanager
def looping_as(kind: str) -> Iterator[None]:
    """Let optimizers of torch go through their parameters in one way, where they know it."""
    original = torch.optim.Optimizer.__init__

    def init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        chosen = {name: name == kind for name in ("fused", "foreach") if name in defaults}
        if kind == "fused" and "fused" not in defaults and "foreach" in defaults:
            chosen["foreach"] = True
        original(self, params, {**defaults, **chosen})

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]
