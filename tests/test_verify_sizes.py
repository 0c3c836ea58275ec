"""Graphs with sizes that depend on values: what is right is proven, what is wrong is refused."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from edit_tools import Edit
from graphopt.errors import AssumptionFailedError
from graphopt.executable import finalize
from graphopt.iter_graph import IterGraphModule
from graphopt.manager.records import records_of
from graphopt.stages import default_pipeline
from graphopt.stages.compiling import Stages
from graphopt.tracing.call import Call
from illegal_edits import ILLEGAL
from legal_edits import LEGAL
from mutation_trials import ITERATIONS, Case, Verdict, trial
from replica_runs import random_inputs, run_steps
from size_edits import SIZE_EDITS
from test_sizes_by_value import OPTIMIZERS, STEPS, Net, Step, batches

DIALECTS = ("captured", "finalized")
FEW = 6
MANY = 36
"""Edits of each step in each dialect, of the sort that has most kinds; of two dialects, every kind
at least once."""

MOVES = {
    name: LEGAL[name]
    for name in (
        "another order", "a node moved", "computed twice", "computed once",
        "computed for nobody", "copies removed", "late work",
    )
}  # fmt: skip
"""Right edits that need no rule, or one of state alone: rules do not speak of symbolic sizes."""


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs edits that shape rules refuse
    yield
    logger.setLevel(level)


def capture(step: Step, optimizer: str = "momentum") -> tuple[Any, list[Any]]:
    """The steady step, and the values of its inputs."""
    torch.manual_seed(0)
    model = Net()
    updates = OPTIMIZERS[optimizer](model.parameters())
    first, second = batches(2)
    step(model, updates, *first)  # optimizers make their state
    args = (model, updates, *second)
    captured = graphopt.capture(step, *args, parallel=graphopt.Manual())
    return captured, captured.live.live_values(Call(step, args, {}))


def case(step: Step, dialect: str = "captured", trials: int = 2) -> Case:
    """With inputs for which the assumptions of the graph hold."""
    captured, values = capture(step)
    gm = IterGraphModule(captured.graph_module)
    if dialect == "finalized":
        gm = IterGraphModule(finalize(gm.setup_gm))
    found = Case(step.__name__, dialect, gm, [])
    for seed in range(50):
        rows = random_inputs(captured.inputs, values, 1, seed)
        try:
            expected = run_steps(gm, rows, ITERATIONS, seed=len(found.inputs))
        except AssumptionFailedError:
            continue
        found.inputs.append(rows)
        found.expected.append(expected)
        if len(found.inputs) == trials:
            return found
    raise AssertionError("no inputs that the graph was captured for")


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
def test_passes_and_stages_are_proven(
    step: Step, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "graphopt"):
        stages = Stages(graphopt.PassManager(default_pipeline()), None)
        captured, _ = capture(step, optimizer)
        made = stages.apply_passes(captured)
        stages.derive(made)
        stages.make_executable(made)
    assert not [line for line in caplog.messages if "not compared" in line or "decided" in line]
    assert any(r.stage for r in records_of(captured.graph_module))


def verdicts(of: Case, edits: dict[str, Edit], count: int, seed: int) -> list[Verdict]:
    """What becomes of so many edits. The dialects of a step share the kinds: one goes on where the
    other has ended."""
    names, first = list(edits), count * DIALECTS.index(of.dialect)
    chosen = [(number, names[(first + number) % len(names)]) for number in range(count)]
    found = [apart(verdict_on, of, name, edits[name], f"{seed} {n}") for n, name in chosen]
    return [verdict for verdict in found if verdict is not None]


def verdict_on(of: Case, name: str, edit: Edit, seed: str) -> Verdict | None:
    """None where there was nothing to edit, or where the graph holds for its inputs no more: what
    is asked about sizes while an edit is checked stays asked."""
    verdict = trial(of, [(name, partial(where_it_fits, edit))], Random(seed))
    narrowed = AssumptionFailedError.__name__ in (verdict.differs or "") and not holds(of)
    return None if verdict.outcome == "none" or narrowed else verdict


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives in a copy of this process: what it leaves in graphs is gone with it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def answer() -> None:
        there.send(function(*args))

    process = context.Process(target=answer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest's workers have a thread more
        process.start()
    there.close()
    with here:
        found = here.recv()  # an EOFError where the process ended without an answer
    process.join()
    return found


def holds(of: Case) -> bool:
    """Whether a graph still holds for the sizes of its inputs."""
    try:
        for trial_number, rows in enumerate(of.inputs):
            run_steps(of.gm, rows, ITERATIONS, seed=trial_number)
    except AssumptionFailedError:
        return False
    return True


def where_it_fits(edit: Edit, gm: fx.GraphModule, draw: Random) -> list[fx.Node] | None:
    """An edit that asks a symbolic number for its value finds no place."""
    try:
        return edit(gm, draw)
    except Exception:
        return None


def all_is_well(step: Step, dialect: str, count: int, seed: int) -> None:
    of = case(step, dialect)
    for edits in (SIZE_EDITS, ILLEGAL):
        wrong = verdicts(of, edits, min(count, 2 * len(edits)), seed)
        assert wrong and not [v for v in wrong if v.differs or v.outcome == "crash"]
    if dialect == "captured":
        right = verdicts(of, MOVES, min(count, 2 * len(MOVES)), seed)
        assert right and not [v for v in right if v.differs or v.outcome != "accepted"]


def test_a_slice_of_edits() -> None:
    steps = list(STEPS)
    all_is_well(steps[0], "captured", FEW, 0)


@pytest.mark.full
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("step", STEPS)
def test_edits(step: Step, dialect: str, seed: int) -> None:
    all_is_well(step, dialect, MANY, seed)
