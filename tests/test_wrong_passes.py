"""Wrong passes on steps of many kinds: the verifier refuses each that computes something else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import graphopt
from edit_tools import Edit
from graphopt.ir.metadata import input_kind
from graphopt.iter_graph import IterGraphModule
from graphopt.parallel import OverRanks
from graphopt.testing import StepUnderTest, fake_ranks
from illegal_edits import ILLEGAL
from zero_cases import Language, Uneven, batches, clipped_step, train_step
from zoo import MODELS
from zoo import train_step as zoo_step

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from cases.language import DenseExperts

FEW = 6
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(**options: Any) -> Optimizer:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def tokens() -> tuple[Tensor, Tensor]:
    words, following = next(batches(0, 1))
    return words, following


def averaged(
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Any, ...],
    step: Callable[..., Any] = train_step,
    pipeline: str = "default",
) -> StepUnderTest:
    """A step of `DataParallel` behind a pipeline."""
    under_test = StepUnderTest(step, (model, optimizer(model.parameters()), *batch))
    gm = IterGraphModule(under_test.graph_module)
    graphopt.PassManager(pipeline).run(gm)
    return StepUnderTest(gm, under_test.inputs)


def sharded(
    kind: OverRanks, model: nn.Module, optimizer: Optimizer, step: Callable[..., Any] = train_step
) -> StepUnderTest:
    """A sharded step behind the default pipeline, with random rows of state."""
    made, batch = optimizer(model.parameters()), tokens()
    step(model, made, *batch)
    captured = graphopt.capture(step, model, made, *batch, parallel=kind)
    gm = IterGraphModule(captured.graph_module)
    graphopt.PassManager("default").run(gm)
    draw = torch.Generator().manual_seed(1)
    nodes = gm.graph.find_nodes(op="placeholder")
    return StepUnderTest(gm, [_value_for(node, draw) for node in nodes])


def _value_for(node: fx.Node, draw: torch.Generator) -> Any:
    like, kind = node.meta["val"], input_kind(node)
    if not isinstance(like, Tensor):
        return like
    shape = tuple(like.shape)
    if kind == "user_input":
        return torch.randint(60, shape, generator=draw)
    if kind == "hyperparameter":
        return torch.tensor(0.01 if node.name.endswith("lr") else 0.9, dtype=like.dtype)
    if not like.is_floating_point():
        return torch.zeros(shape, dtype=like.dtype)
    if not shape:
        return torch.tensor(3.0, dtype=like.dtype)
    return (torch.rand(shape, generator=draw) * 0.5 + 0.1).to(like.dtype)


def of_zoo(name: str, optimizer: Optimizer, pipeline: str = "default") -> StepUnderTest:
    model, batch = MODELS[name].make(), MODELS[name].batch(0)
    return averaged(model, optimizer, batch, zoo_step, pipeline)


def experts() -> StepUnderTest:
    words = torch.randint(20, (4, 8))
    return averaged(DenseExperts(), adamw(foreach=True), (words, words))


def two_groups() -> StepUnderTest:
    """The step sums its loss in a group of its own."""
    group = dist.new_group([0, 1])

    def step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        seen = train_step(model, optimizer, inputs, targets).clone()
        dist.all_reduce(seen, group=group)
        return seen

    return averaged(Language(), adamw(fused=True), tokens(), step)


def hybrid() -> StepUnderTest:
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    kind = graphopt.ZeRO(stage=1, group=rows[0], replicate_over=columns[0])
    return sharded(kind, Uneven(), adamw(fused=True))


BUCKETS = "comm_fusion_with_concat(bucket_size_mb=0.002) -> schedule_comm_wait"
STEPS: dict[str, tuple[int, Callable[[], StepUnderTest]]] = {
    "averaged, fused": (2, lambda: averaged(Language(), adamw(fused=True), tokens())),
    "averaged, lists": (2, lambda: of_zoo("mlp", adamw(foreach=True))),
    "images in buckets": (3, lambda: of_zoo("convnet", sgd, BUCKETS)),
    "checkpointed": (2, lambda: of_zoo("checkpointed", adamw(foreach=False))),
    "clipped": (2, lambda: averaged(Language(), adamw(fused=True), tokens(), clipped_step)),
    "experts": (2, experts),
    "two groups": (2, two_groups),
    "stage 1": (2, lambda: sharded(graphopt.ZeRO(stage=1), Language(), adamw(fused=True))),
    "stage 1, uneven": (
        3,
        lambda: sharded(graphopt.ZeRO(stage=1), Uneven(), adamw(foreach=True), clipped_step),
    ),
    "stage 3": (2, lambda: sharded(graphopt.ZeRO(stage=3), Language(), adamw(foreach=True))),
    "stage 3, uneven": (
        2,
        lambda: sharded(graphopt.ZeRO(stage=3), Uneven(), adamw(fused=True), clipped_step),
    ),
    "hybrid": (4, hybrid),
}
"""Ranks, and what captures a step on them."""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs edits that shape rules refuse
    yield
    logger.setLevel(level)


def outcome(step: StepUnderTest, edit: Edit, draw: Random) -> str:
    """What becomes of a pass that makes an edit: "nothing to edit", "refused", or "accepted" if
    the verifier takes it and bits are the same; a text that says more if they are not."""
    touched: list[Any] = []

    @graphopt.graph_optimization_pass(registry=graphopt.PassRegistry())
    def wrong(gm: IterGraphModule) -> None:
        touched.append(edit(gm, draw))

    try:
        step.check(wrong, idempotent=False, may_change_nothing=True)
    except graphopt.GraphOptError as error:
        return f"it raised: {error}" if not touched else "refused"
    except AssertionError as error:
        return f"not refused by the verifier: {error}"
    return "nothing to edit" if touched == [None] else "accepted"


def outcomes(name: str, kinds: list[str], seed: int) -> dict[str, str]:
    ranks, make = STEPS[name]
    torch.manual_seed(0)
    with fake_ranks(ranks):
        step = make()
        return {
            kind: outcome(step, ILLEGAL[kind], Random(f"{name} {kind} {seed}")) for kind in kinds
        }


def all_is_well(found: dict[str, str]) -> bool:
    known = ("nothing to edit", "refused", "accepted")
    assert {kind: text for kind, text in found.items() if text not in known} == {}
    return "refused" in found.values()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", STEPS)
def test_a_few(name: str) -> None:
    first = FEW * list(STEPS).index(name)
    assert all_is_well(outcomes(name, list(ILLEGAL)[first : first + FEW], 0))


@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_all(name: str, seed: int) -> None:
    assert all_is_well(outcomes(name, list(ILLEGAL), seed))
