"""A step on real gloo ranks, as torch's profiler has seen it, laid over the predicted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from gloo import Pool
from graphopt.errors import FileError, MissingFileError
from graphopt.schedule import measured_step


def trained(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def profiled(rank: int, folder: str, calls: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    step = graphopt.compile(trained, pipeline="none")
    step(model, optimizer, torch.randn(8, 64))
    with torch.profiler.profile() as profile:
        for _ in range(calls):
            step(model, optimizer, torch.randn(8, 64))
        step.flush()
    path = Path(folder) / f"trace{rank}.json"
    profile.export_chrome_trace(str(path))
    timeline = graphopt.simulate(step.graph_module)
    if calls < 2:
        with pytest.raises(FileError, match="two calls"):
            measured_step(path)
        return {}
    measured = measured_step(path)
    page, trace = Path(folder) / f"page{rank}.html", Path(folder) / f"both{rank}.json"
    timeline.to_html(page, measured)
    timeline.save_chrome_trace(trace, measured)
    return {
        "predicted": [slot.message.launch.name for slot in timeline.collectives],
        "measured": [slot._asdict() for slot in measured.collectives],
        "compute": [slot._asdict() for slot in measured.compute],
        "seconds": measured.step_seconds,
        "page": page.read_text(),
        "events": json.loads(trace.read_text())["traceEvents"],
    }


def test_a_measured_step_beside_the_predicted_one(two_ranks: Pool, tmp_path: Path) -> None:
    for found in two_ranks.run(profiled, str(tmp_path), 5):
        assert len(found["measured"]) == len(found["predicted"]) > 1
        assert {slot["name"] for slot in found["measured"]} == {"gloo:all_reduce"}
        names = [slot["name"] for slot in found["compute"]]
        assert names.count("aten::mm") + names.count("aten::addmm") == 4 + 4 + 3
        assert not [name for name in names if "wait_tensor" in name]
        ends = [slot["start"] + slot["seconds"] for slot in found["compute"]]
        starts = [slot["start"] for slot in found["compute"]]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))
        assert 0 < sum(slot["seconds"] for slot in found["compute"]) < found["seconds"]
        assert found["page"].count("predicted: ") == len(found["predicted"])
        assert '"reader","measured"]' in found["page"]
        beside = [event for event in found["events"] if event["pid"] == 1 and event["ph"] == "X"]
        assert len(beside) == len(found["measured"]) + len(found["compute"])


def test_one_call_is_no_step(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(profiled, str(tmp_path), 1) == [{}, {}]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(MissingFileError):
        measured_step(path)
    for text in ("", "[]", "{}", '{"traceEvents": [{}]}', '{"traceEvents": []}'):
        path.write_text(text)
        with pytest.raises(FileError, match="trace"):
            measured_step(path)
