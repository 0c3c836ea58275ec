"""What `graphopt show` prints is saved with a graph, and needs no torch to be read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from typer.testing import CliRunner

import graphopt
from graphopt import cli
from graphopt.comm import get_all_comm_blocks, parameters_of
from graphopt.listing import packed, read_listing
from graphopt.saved import full_listing, load_description, load_graph, save_graph
from graphopt.testing import fake_ranks
from steps import mean_square

ROOT = Path(__file__).resolve().parent.parent


class Scaled(nn.Module):
    """Has a constant in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.factor = torch.tensor(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.factor
        return result


def step_of_ranks() -> fx.GraphModule:
    model = Scaled()
    with fake_ranks(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = graphopt.capture(mean_square, model, optimizer, torch.randn(5, 4))
        module = graphopt.IterGraphModule(captured.graph_module)
        pipeline = "remove_copy_from_optimizer -> iter_move_grads_and_optimizers"
        graphopt.PassManager(pipeline).run(module)
    assert module.graph.late
    return module


def forward_alone() -> fx.GraphModule:
    return graphopt.capture(lambda m, x: m(x).tanh(), Scaled(), torch.ones(2, 4)).graph_module


GRAPHS = [step_of_ranks, forward_alone]


@pytest.mark.parametrize("make", GRAPHS)
def test_what_is_saved_is_what_the_graph_shows(
    make: Callable[[], fx.GraphModule], tmp_path: Path
) -> None:
    path = tmp_path / "step.pt"
    save_graph(make(), path)
    assert read_listing(path) == full_listing(load_description(path))
    assert read_listing(path) == full_listing(load_graph(path))


def test_a_loaded_graph_knows_what_its_collectives_send(tmp_path: Path) -> None:
    step = step_of_ranks()
    save_graph(step, tmp_path / "step.pt")
    loaded = load_graph(tmp_path / "step.pt")
    sent = [[parameters_of(gm, b) for b in get_all_comm_blocks(gm)] for gm in (step, loaded)]
    assert sent[0] == sent[1] == [("linear.bias",), ("linear.weight",)]


SHOW = """
import sys
from typer.testing import CliRunner
from graphopt.cli import app
for arguments in (["show", sys.argv[1]], ["show", sys.argv[1], "--phase", "backward"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    print(result.output, end="")
print(sorted({"torch", "numpy", "networkx"} & set(sys.modules)), file=sys.stderr)
"""


def test_show_needs_no_torch(tmp_path: Path) -> None:
    """Whose import takes longer than all else."""
    path = tmp_path / "step.pt"
    save_graph(step_of_ranks(), path)
    command = [sys.executable, "-c", SHOW, str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "[]\n"), result.stderr
    assert "── forward ──" in result.stdout and "collectives, predicted" in result.stdout


def shown(path: Path, *options: str) -> str:
    result = CliRunner().invoke(cli.app, ["show", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("make", GRAPHS)
def test_a_file_without_a_listing(make: Callable[[], fx.GraphModule], tmp_path: Path) -> None:
    """Such as an older one, or of a graph that could not be shown."""
    new, old = tmp_path / "new.pt", tmp_path / "old.pt"
    save_graph(make(), new)
    saved = torch.load(new, weights_only=True)
    del saved["listing"]
    torch.save(saved, old)
    assert read_listing(old) is None
    for options in ((), ("--phase", "forward"), ("--phase", "communication")):
        assert shown(new, *options) == shown(old, *options)


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.folder,)


def test_reading_runs_no_code_of_the_file(tmp_path: Path) -> None:
    listing = packed(full_listing(forward_alone()))
    planted = Planted(tmp_path / "made")
    content = {"format": "graphopt graph", "version": 1, "listing": listing, "more": planted}
    with zipfile.ZipFile(tmp_path / "step.pt", "w") as archive:
        archive.writestr("step/data.pkl", pickle.dumps(content))
    assert read_listing(tmp_path / "step.pt") is not None
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("change", ["format", "version", "listing", "bytes", "cut", "text"])
def test_what_is_no_whole_file_is_refused_by_its_graph(change: str, tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    save_graph(forward_alone(), path)
    if change in ("format", "version", "listing"):
        saved = torch.load(path, weights_only=True)
        torch.save({**saved, change: "other"}, path)
    else:
        content = bytearray(path.read_bytes())
        middle = content.index(b"aten::tanh")
        content[middle : middle + 4] = b"ATEN"
        changed = {"bytes": bytes(content), "cut": bytes(content[:middle]), "text": b"no archive"}
        path.write_bytes(changed[change])
    assert read_listing(path) is None
    result = CliRunner().invoke(cli.app, ["show", str(path)])
    assert result.exit_code == (0 if change == "listing" else 2), result.output
