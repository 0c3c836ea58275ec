"""What passes write to files when several ranks run them at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import fx

from gloo import Pool, pool
from graphopt.errors import PassError
from graphopt.manager import PassManager, PassRegistry, applied_passes, graph_optimization_pass
from graphopt.saved import load_graph
from graphs import training_step


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with pool(2) as ranks:
        yield ranks


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


@pytest.mark.slow
def test_each_rank_has_files_of_its_own(two_ranks: Pool, tmp_path: Path) -> None:
    messages = two_ranks.run(run_and_fail, str(tmp_path))
    for rank in (0, 1):
        names = {path.name for path in (tmp_path / f"rank{rank}").iterdir()}
        assert names == {"after_fine.txt", "after_fine.diff"}
    files = sorted((tmp_path / "graphopt-repro").iterdir())
    assert [path.name for path in files] == ["01.pt", "02.pt"]
    assert all(applied_passes(load_graph(path)) == ["fine"] for path in files)
    assert all(any(str(path) in message for message in messages) for path in files)
