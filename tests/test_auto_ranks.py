"""`pipeline="auto"` on real gloo ranks: rank 0 decides, all have the same, a file keeps it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from gloo import Pool
from graphopt.cost import Collective, CostModel, Transfer
from graphopt.iter_graph import IterGraphModule
from graphopt.stages.auto import BUCKETS, HELD_BACK, Plan, fastest
from graphopt.stages.pipelines import pipeline_with
from sketch import one_rank


def made(layers: int = 4, width: int = 96) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


seen: list[torch.Tensor] = []


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    graphopt.callback(seen.append, loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def options_of(step: graphopt.TrainStep) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in step.report:
        found |= {k: v for k, v in record.arguments.items() if k in Plan._fields}
    return found


def trained(rank: int, plans: str | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, optimizer = made()
    step = graphopt.compile(train_step, pipeline=graphopt.AutoPipeline(plans) if plans else "auto")
    eager, eager_optimizer = made()
    ddp = DistributedDataParallel(eager)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(8, 96, generator=generator)
        step(model, optimizer, x)
        train_step(ddp, eager_optimizer, x)
    step.flush()
    assert len(seen) == 8  # measuring calls nothing of the program's
    seen.clear()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    return [p.detach() for p in model.parameters()], options_of(step)


def test_rank_0_decides(two_ranks: Pool) -> None:
    (_, one), (_, other) = two_ranks.run(trained, None)
    assert one == other
    assert one["min_buckets"] in BUCKETS and one["held_back"] in HELD_BACK


def test_a_file_keeps_what_was_chosen(two_ranks: Pool, tmp_path: Path) -> None:
    plans = tmp_path / "plans.json"
    first = two_ranks.run(trained, str(plans))[0][1]
    content = json.loads(plans.read_text())
    (key,) = content["plans"]
    assert content["plans"][key] == first and key.endswith(" on 2")
    content["plans"][key] = {"min_buckets": 3, "held_back": 0.25}  # what no measurement chooses
    plans.write_text(json.dumps(content))
    assert two_ranks.run(trained, str(plans))[1][1] == Plan(3, 0.25)._asdict()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"format": "graphopt plans", "plans": {"x": 1}}',
        '{"format": "graphopt plans", "plans": {"x": {"min_buckets": 1, "held_back": 1.5}}}',
        '{"format": "graphopt plans", "plans": {"x": {"min_buckets": 1, "shares": 0.5}}}',
    ],
)
def test_a_damaged_file_is_not_used(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans = tmp_path / "plans.json"
    plans.write_text(text)
    with caplog.at_level(logging.WARNING, "graphopt"):
        assert graphopt.AutoPipeline(plans)._kept() == {}
    assert "are not used" in caplog.text


def test_alone_nothing_is_measured() -> None:
    model, optimizer = made()
    step = graphopt.compile(train_step, pipeline="auto")
    step(model, optimizer, torch.ones(8, 96))
    assert options_of(step) == {"min_buckets": None, "held_back": 0.4}


def constant_costs(overhead: float, rate: float) -> CostModel:
    def transfer(collective: Collective) -> Transfer:
        return Transfer(0.0, collective.nbytes / rate, overhead=overhead)

    return CostModel(lambda node: 1e-3 if "mm" in str(node.target) else 0.0, transfer)


@pytest.mark.parametrize(("overhead", "rate"), [(1e-2, 1e12), (1e-6, 2e7), (1e-3, 1e8)])
def test_the_fastest_of_all(overhead: float, rate: float) -> None:
    """Within 3 % of what trying everything finds."""
    with one_rank():
        model, optimizer = made(layers=10, width=320)
        parallel = graphopt.DataParallel()
        x = torch.ones(8, 320)
        gm = graphopt.capture(train_step, model, optimizer, x, parallel=parallel).graph_module
        costs = constant_costs(overhead, rate)
        before = str(gm.graph)
        chosen = fastest(gm, costs)
        assert str(gm.graph) == before

        def seconds(*options: Any) -> float:
            module = IterGraphModule(copy.deepcopy(gm))
            graphopt.PassManager(pipeline_with(*options), verify="off").run(module)
            return graphopt.simulate(module, costs, world_size=2).step_seconds

        every = [seconds(count, share) for count in (1, 3, 6, 10, 20) for share in (0.0, 0.3, 0.5)]
        assert seconds(*chosen.values()) <= 1.03 * min(every)
