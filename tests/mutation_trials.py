"""Captured steps under edits: what the manager's default verification says, and what is computed.

An edit that changes what is computed has to be refused. One that is accepted is run on two
replicas, and is a defect where any bit differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from edit_tools import Edit, is_update
from graphopt.executable import finalize
from graphopt.graph_utils import eliminate_dead_code, written
from graphopt.ir.positions import give_by_position
from graphopt.iter_graph import IterGraphModule
from graphopt.manager.callbacks import PassContext, Verification
from graphopt.manager.problems import Refused
from graphopt.manager.records import PassRecord
from graphopt.manager.snapshot import Snapshot
from graphopt.manager.text import Pipeline
from graphopt.manager.wellformed import find_problem
from graphopt.tracing.call import Call
from graphopt.verify import check_finalized
from graphopt.verify.checks.written_nodes import changed_problems
from replica_runs import Row, difference, random_inputs, run_steps
from zoo import MODELS, OPTIMIZERS, train_step

CASES = [
    ("mlp", "adamw-fused"),
    ("gpt", "adamw-foreach"),
    ("convnet", "sgd-momentum-loop"),
    ("reused", "sgd-nesterov-foreach"),
    ("partial", "adam-decay-fused"),
    ("checkpointed", "adamw-loop"),
    ("recurrent", "rmsprop-foreach"),
    ("parametrized", "nadam-loop"),
    ("running-mean", "adagrad-fused"),
    ("shared-storage", "sgd-fused"),
]
DIALECTS = ("captured", "bucketed", "late", "finalized")

PIPELINE: list[Any] = [
    ("remove_copy_from_optimizer", {}),
    ("comm_fusion_with_concat", {"bucket_size_mb": 0.002}),
    ("schedule_comm_wait", {}),
    ("iter_move_grads_and_optimizers", {"held_back": 0.33}),
]
PASSES = {"captured": 0, "bucketed": 3, "late": 4, "finalized": 3}
RANKS, ITERATIONS = 2, 3


@contextmanager
def two_ranks() -> Iterator[None]:
    """A group of two, of which this process is one; nothing is communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Case:
    """One captured step, and what it takes."""

    model: str
    dialect: str
    gm: fx.GraphModule
    inputs: list[list[Row]]
    expected: list[list[Row]] = field(default_factory=list)


def case(model: str, optimizer: str, dialect: str, trials: int = 2) -> Case:
    """Capture a step for two ranks, and run it."""
    torch.manual_seed(0)
    made = MODELS[model].make()
    args = (made, OPTIMIZERS[optimizer](made.parameters()), *MODELS[model].batch(0))
    train_step(*args)
    captured = graphopt.capture(train_step, *args, parallel=graphopt.DataParallel())
    gm = IterGraphModule(captured.graph_module)
    values = captured.live.live_values(Call(train_step, args, {}))
    if PASSES[dialect]:
        graphopt.PassManager(PIPELINE[: PASSES[dialect]], verify="off").run(gm)
    if dialect == "finalized":
        gm = IterGraphModule(finalize(gm.setup_gm))
    inputs = [random_inputs(captured.inputs, values, RANKS, 7 * t) for t in range(trials)]
    found = Case(model, dialect, gm, inputs)
    found.expected = [run_steps(gm, rows, ITERATIONS, seed=t) for t, rows in enumerate(inputs)]
    return found


@dataclass(frozen=True)
class Verdict:
    """What became of one edit.

    Attributes:
        edits: names.
        outcome: "none" (nothing to edit, or nothing changed), "refused", "accepted", "crash".
        named: of a refusal: whether a node that was touched is named.
        differs: of an accepted edit: where something else is computed, if anywhere.
        message: of the refusal or crash.
    """

    edits: tuple[str, ...]
    outcome: str
    named: bool = False
    differs: str | None = None
    message: str = ""


def trial(
    of: Case, edits: Sequence[tuple[str, Edit]], draw: Random, *, run: bool = True
) -> Verdict:
    """Edit a copy, verify it as a `PassManager` would, and run it if it is accepted."""
    names = tuple(name for name, _ in edits)
    gm = IterGraphModule(of.gm)
    context = context_of(gm)
    unedited = fx.GraphModule(gm, context.before.graph)
    verification = Verification("equivalence")
    verification.before_pass(context)
    touched = _edited(gm, edits, draw)
    if touched is None:
        return Verdict(names, "none")
    try:
        changed = verify(context, verification, unedited)
    except Refused as refused:
        problems = refused.problems
        near = _near(touched)
        named = any(node.name in near for p in problems for node in p.nodes)
        return Verdict(names, "refused", named, message=str(problems[0]))
    except Exception as error:
        return Verdict(names, "crash", message=f"{type(error).__name__}: {error}")
    if not changed:
        return Verdict(names, "none")
    return Verdict(names, "accepted", differs=computes_otherwise(of, gm))


def _edited(
    gm: IterGraphModule, edits: Sequence[tuple[str, Edit]], draw: Random
) -> list[fx.Node] | None:
    touched: list[fx.Node] = []
    for number, (_, edit) in enumerate(edits):
        try:
            found = edit(gm, draw)
        except Exception:
            if not number:
                raise
            return None  # the first edit has left a graph of which the second can make nothing
        if found is None:
            return None
        touched += found
    return touched


def _near(touched: Sequence[fx.Node]) -> set[str]:
    """Names of what was touched, and of what stands directly beside it."""
    names = {node.name for node in touched}
    for node in touched:
        names.update(user.name for user in node.users)
        names.update(source.name for source in node.all_input_nodes)
    return names


def context_of(gm: fx.GraphModule) -> PassContext:
    """As a `PassManager` makes one for a pass that is about to run."""
    before, record = Snapshot(gm), PassRecord("edit")
    return PassContext(gm, edit_of_a_trial, {}, Pipeline([]), 0, before, record)


def verify(context: PassContext, verification: Verification, unedited: fx.GraphModule) -> bool:
    """What a `PassManager` does when a pass has run. Returns whether anything has changed.

    Raises:
        Refused: the graph is broken, or is not the same computation.
    """
    gm, before = context.gm, context.before
    found = find_problem(gm, before)
    if found is not None:
        raise Refused([found])
    give_by_position(gm.graph)
    eliminate_dead_code(gm.graph)
    context.record.changed = not before.unchanged()
    if not context.record.changed:
        verification.after_pass(context)
        return False
    gm.recompile()
    if is_finalized(before.graph):
        new, changed = before.new_nodes(), before.changed_nodes()
        wrong = changed_problems(new, changed, before.former_arguments, functional=False)
        problems = [*wrong, *check_finalized(unedited, gm).problems]
        if problems:
            raise Refused(problems)
    else:
        verification.after_pass(context)
    return True


def is_finalized(graph: fx.Graph) -> bool:
    """Whether a graph updates values in place."""
    return any(written(node) and not is_update(node) for node in graph.nodes)


def computes_otherwise(of: Case, gm: IterGraphModule) -> str | None:
    """Where some trial gives other bits, or that it cannot run."""
    for number, (rows, expected) in enumerate(zip(of.inputs, of.expected, strict=True)):
        try:
            found = run_steps(gm, rows, ITERATIONS, seed=number)
        except Exception as error:
            return f"it does not run: {type(error).__name__}: {error}"
        where = difference(expected, found)
        if where is not None:
            return where
    return None


@graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
def edit_of_a_trial(gm: fx.GraphModule) -> None:
    """Stands for the pass that made an edit."""


def counts(verdicts: Sequence[Verdict]) -> Counter[str]:
    """Outcomes, with accepted ones that compute otherwise as "different"."""
    found: Counter[str] = Counter()
    for verdict in verdicts:
        found["different" if verdict.differs else verdict.outcome] += 1
        found["named"] += verdict.named
    return found
