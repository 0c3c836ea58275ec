"""What passes write to files when several ranks run them at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import graphopt
from gloo import Pool
from graphopt.errors import PassError, SpmdMismatchError
from graphopt.manager import PassManager, PassRegistry, applied_passes, graph_optimization_pass
from graphopt.passes import comm_fusion_with_concat
from graphopt.saved import load_graph
from graphs import training_step


def run_and_fail(rank: int, folder: str) -> str:
    registry = PassRegistry()

    @graph_optimization_pass(registry=registry)
    def fine(gm: fx.GraphModule) -> int:
        return 0

    @graph_optimization_pass(registry=registry)
    def crash(gm: fx.GraphModule) -> None:
        raise LookupError("on every rank")

    manager = PassManager("fine -> crash", registry=registry, dump_dir=folder)
    with pytest.raises(PassError, match="on every rank") as caught:
        manager.run(training_step(1))
    return str(caught.value)


def test_each_rank_has_files_of_its_own(two_ranks: Pool, tmp_path: Path) -> None:
    messages = two_ranks.run(run_and_fail, str(tmp_path))
    for rank in (0, 1):
        names = {path.name for path in (tmp_path / f"rank{rank}").iterdir()}
        assert names == {"after_fine.txt", "after_fine.diff"}
    files = sorted((tmp_path / "graphopt-repro").iterdir())
    assert [path.name for path in files] == ["01.pt", "02.pt"]
    assert all(applied_passes(load_graph(path)) == ["fine"] for path in files)
    assert all(any(str(path) in message for message in messages) for path in files)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run_unequally(rank: int) -> str:
    @graph_optimization_pass(registry=PassRegistry())
    def the_same(gm: fx.GraphModule) -> int:
        return 0

    @graph_optimization_pass(registry=PassRegistry())
    def by_rank(gm: fx.GraphModule) -> int:
        return comm_fusion_with_concat.function(gm) if rank else 0

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    train = graphopt.compile(step, pipeline=[the_same, by_rank])
    with pytest.raises(SpmdMismatchError) as caught:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    return str(caught.value)


def test_a_pass_that_did_not_do_the_same_on_all_ranks_is_named(two_ranks: Pool) -> None:
    for message in two_ranks.run(run_unequally):
        assert "rank 1 has other collectives than rank 0" in message
        assert "pass:    'by_rank' did not do the same on all ranks" in message
