"""Parameters gathered early, many in one call, and awaited in the next iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.graph_utils import is_wait
from graphopt.ir.metadata import phase_of
from graphopt.testing import fake_ranks
from zero_cases import Language, Uneven, clipped_step, train_step
from zero_graphs import assert_same_bits, computed, launches, sharded_graph

Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}
STEPS = {"plain": train_step, "clipped": clipped_step}
MODELS = {"language": lambda: Language(layers=2, width=256), "uneven": Uneven}
FUSED = "remove_copy_from_optimizer -> fuse_exchanges(bucket_size_mb=0.5) -> schedule_comm_wait"
PIPELINE = f"{FUSED} -> schedule_gathers -> iter_move_grads_and_optimizers"


@pytest.mark.covering(2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_same_bits(ranks: int, stage: int, model: str, optimizer: str, step: str) -> None:
    with fake_ranks(ranks):
        made = [
            sharded_graph(MODELS[model], OPTIMIZERS[optimizer], STEPS[step], stage=stage)
            for _ in range(2)
        ]
        graphopt.PassManager(PIPELINE).run(made[1])
        before, after = (len(launches(gm, "all_gather")) for gm in made)
        assert after <= before
        assert_same_bits(computed(made[0], ranks), computed(made[1], ranks))


def scheduled(stage: int, step: Callable[..., Any] = train_step, **options: Any) -> Any:
    gm = sharded_graph(
        lambda: Language(layers=4, width=256),
        OPTIMIZERS["adamw fused"],
        step,
        stage=stage,
        **options,
    )
    graphopt.PassManager(PIPELINE).run(gm)
    return gm


def places(gm: fx.GraphModule, nodes: list[fx.Node]) -> list[int]:
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    return [order[node] for node in nodes]


def test_stage_one_gathers_in_the_backward_and_waits_in_the_next_step() -> None:
    with fake_ranks(2):
        gm = scheduled(1)
    gathers = launches(gm, "all_gather")
    backward = [node for node in gm.graph.nodes if phase_of(node) == "backward"]
    (end,) = places(gm, backward[-1:])
    early = [place for place in places(gm, gathers) if place < end]
    assert 0 < len(early) < len(gathers)
    waits = [n for n in gm.graph.nodes if is_wait(n) and gm.graph.is_late(n)]
    assert waits
    assert not any(map(gm.graph.is_late, gathers))


def test_clipping_leaves_gathers_at_the_end_in_several_calls() -> None:
    with fake_ranks(2):
        gm = scheduled(1, clipped_step)
    gathers = launches(gm, "all_gather")
    backward = [node for node in gm.graph.nodes if phase_of(node) == "backward"]
    (end,) = places(gm, backward[-1:])
    assert len(gathers) > 1
    assert all(place > end for place in places(gm, gathers))


def test_stage_three_gathers_ahead_of_use() -> None:
    with fake_ranks(2):
        gm = scheduled(3)
    gathers = launches(gm, "all_gather")
    assert len(gathers) > 4
    ahead = []
    order = list(gm.graph.nodes)
    for place, later in zip(places(gm, gathers), places(gm, gathers)[2:], strict=False):
        waits = [p for p, n in enumerate(order) if is_wait(n) and _launch(n) is order[place]]
        ahead.append(min(waits) > later)
    assert all(ahead[:-3])


def _launch(wait: fx.Node) -> fx.Node:
    source: Any = wait.args[0]
    return source.args[0] if "getitem" in str(source.target) else source


def test_what_is_kept_is_gathered_once() -> None:
    with fake_ranks(2):
        counts = [
            sum(
                len(node.args[0]) if isinstance(node.args[0], (list, tuple)) else 1
                for node in found
            )
            for found in (
                launches(scheduled(3, keep_mb=size), "all_gather") for size in (0, 1, 1000)
            )
        ]
    assert counts[0] > counts[1] > counts[2]
