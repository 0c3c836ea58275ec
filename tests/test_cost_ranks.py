"""Calibration on real gloo ranks: rank 0 decides, and a rank that is alone is told so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gloo import Pool
from graphopt.cost import Collective, CollectiveTable, OperatorTable, calibrate
from graphopt.cost.operators import Measurement
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import find_nodes, is_collective
from graphs import inputs_of, training_step


def calibrated(rank: int, folder: str) -> list[str]:
    step = training_step(2, ranks=None)
    table = Path(folder) / f"costs{rank}.json"
    first = calibrate(step, inputs_of(step), table=table)
    assert table.exists() == (rank == 0)
    assert isinstance(first.compute, OperatorTable)
    assert isinstance(first.communication, CollectiveTable)
    measured = first.communication.points["all_reduce", 2]
    assert [seconds for _, seconds in measured] == sorted(seconds for _, seconds in measured)
    assert first.communication(Collective("broadcast", 2**20, 2, "g")).seconds > 0
    assert 0 <= first.slowdown < 10
    again = calibrate(step, inputs_of(step), table=table)
    assert again == first
    return [first.to_text()]


def test_all_ranks_have_what_rank_0_found(two_ranks: Pool, tmp_path: Path) -> None:
    one, other = two_ranks.run(calibrated, str(tmp_path))
    assert one == other


def sent_once(rank: int) -> int:
    """How often a measured graph launches its collectives, in three runs."""
    step = training_step(2, ranks=2)
    launched = 0
    with torch.profiler.profile() as profile:
        measurement = Measurement(step, inputs_of(step))
        for _ in range(2):
            measurement.run()
    for event in profile.events():
        launched += event.name == "_c10d_functional::all_reduce"
    collectives = len(find_nodes(step.graph, is_collective))
    assert collectives > 0
    return launched - collectives


def test_collectives_of_a_measured_graph_run_once(two_ranks: Pool) -> None:
    assert two_ranks.run(sent_once) == [0, 0]


def alone(rank: int) -> str:
    if rank:
        return ""
    step = training_step(2, ranks=None)
    with pytest.raises(SpmdMismatchError) as caught:
        calibrate(step, inputs_of(step), table="/nonexistent/costs.json", timeout=1.0)
    return str(caught.value)


def test_a_rank_alone_is_told_so(two_ranks: Pool) -> None:
    assert "1" in two_ranks.run(alone)[0]
