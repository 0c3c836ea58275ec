"""Parameters gathered early, many in one call, and awaited in the next iteration; gathers placed by
costs, which do not delay the last scatter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import graphopt
from graphopt.comm import CommBlock, get_all_comm_blocks
from graphopt.cost import CostModel, Network
from graphopt.graph_utils import is_wait
from graphopt.ir.metadata import phase_of
from graphopt.iter_graph import IterGraphModule
from graphopt.iter_graph.graph import copy_graph
from graphopt.optim import split_updates
from graphopt.schedule import Schedule, apply_schedule
from graphopt.schedule.constraints import predecessors
from graphopt.schedule.early_gathers import place_by_cost
from graphopt.schedule.gathers import (
    GatherGroup,
    gathers_of_parameters,
    grouped,
    is_gather,
    order_of_gathers,
)
from graphopt.schedule.prefetch import uses_of_gathers
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


NODE_SECONDS = 1e-3


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


@functools.cache
def expanded(stage: int, **options: Any) -> IterGraphModule:
    return sharded_graph(lambda: Language(layers=3, width=256), adamw, stage=stage, **options)


def costs(bytes_per_second: float, start: float = 0.0) -> CostModel:
    network = Network("made up", 0.0, bytes_per_second, start=start)
    return CostModel(lambda node: NODE_SECONDS * (node.op == "call_function"), network)


def copied(gm: fx.GraphModule) -> IterGraphModule:
    return IterGraphModule(fx.GraphModule(gm, copy_graph(gm.graph)[0]))


def last_scatter(graph: fx.Graph, blocks: list[CommBlock], model: CostModel) -> float:
    """When it has arrived, in a step that waits for nothing before."""
    timeline = graphopt.simulate(fx.GraphModule({}, graph), model, 2)
    launch = blocks[-1].comm_node
    (found,) = [s.end - timeline.begin for s in timeline.collectives if s.message.launch is launch]
    return found


def computed_before(graph: fx.Graph, blocks: list[CommBlock]) -> int:
    """Nodes that compute before the last scatter is launched."""
    last = blocks[-1].comm_node
    return sum(node.op == "call_function" for node in graph.nodes if node < last)


def parts_of_updates(gm: fx.GraphModule) -> tuple[list[GatherGroup], list[CommBlock]]:
    kinds = ("all_to_all_single", "all_reduce")
    blocks = list(get_all_comm_blocks(gm, kinds))
    updates = split_updates(gm, [block.outputs for block in blocks])
    return grouped(gathers_of_parameters(gm.graph), blocks, updates), blocks


@pytest.mark.parametrize("bytes_per_second", [1e6, 1e8, 3e8, 1e10])
def test_the_last_scatter_is_not_delayed(bytes_per_second: float) -> None:
    model = costs(bytes_per_second)
    with fake_ranks(2):
        gm = copied(expanded(1))
        graphopt.PassManager(FUSED).run(gm)
        groups, blocks = parts_of_updates(gm)
        order = order_of_gathers(gm.graph, predecessors(gm.graph), groups)
        late = last_scatter(reordered(gm.graph, order), blocks, model)
        behind = computed_before(gm.graph, blocks)
        place_by_cost(gm.graph, groups, blocks, model)
        early = [group for group in groups if group.after is not None]
        schedule = order_of_gathers(gm.graph, predecessors(gm.graph), groups)
        found = last_scatter(reordered(gm.graph, schedule), blocks, model)
        updates = NODE_SECONDS * (computed_before(gm.graph, blocks) - behind)
        assert found <= late + updates + 1e-9
    launched = [block.comm_node for block in blocks]
    for group in early:
        assert launched.index(group.after) >= launched.index(group.block.comm_node)  # type: ignore[arg-type, union-attr]
    assert bool(early) == (bytes_per_second > 1e7), "a slow link is never idle, a fast one is"


def reordered(graph: fx.Graph, schedule: Schedule) -> fx.Graph:
    apply_schedule(graph, Schedule(schedule.order))
    return graph


def test_uneven_rows_are_gathered_ahead_of_use() -> None:
    """What puts their windows together belongs to the gather, and is no use of it."""
    with fake_ranks(3):
        graph = sharded_graph(Uneven, adamw, stage=3).graph
    gathers = [node for node in graph.nodes if is_gather(node)]
    assert {use.launch for use in uses_of_gathers(graph)} == set(gathers)


def test_the_last_parameter_stays_whole() -> None:
    """The head, which the backward would gather again at once."""
    with fake_ranks(2):
        found = [launches(expanded(3, keep_mb=size), "all_gather") for size in (0, None)]
    assert len(found[0]) == len(found[1]) + 1
    sent = [[str(node.args[0]) for node in each] for each in found]
    again = [name for name in set(sent[0]) if sent[0].count(name) > sent[1].count(name)]
    assert len(again) == 1 and "head" in again[0]
