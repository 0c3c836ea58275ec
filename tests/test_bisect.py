"""`graphopt bisect`: the first pass after which something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.commands.bisect import Culprit, first_failure
from graphopt.saved import save_graph
from graphs import training_step

PASSES = '''
import torch
from torch import fx
import graphopt

def scale(gm, factor):
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default)
    with gm.graph.inserting_after(node):
        new = graphopt.graph_utils.call_function_with_meta(
            gm.graph, torch.ops.aten.mul.Tensor, (node, factor), like=node)
    for user in [u for u in node.users if u is not new]:
        user.replace_input_with(node, new)

@graphopt.graph_optimization_pass(repeatable=True)
def right_one(gm: fx.GraphModule) -> None:
    """Changes nothing."""

@graphopt.graph_optimization_pass(repeatable=True)
def wrong_one(gm: fx.GraphModule) -> None:
    """Scales an activation."""
    scale(gm, 2.0)
'''


@given(passes=st.integers(1, 40), first=st.integers(0, 41))
def test_the_first_failure_is_found(passes: int, first: int) -> None:
    asked: list[int] = []

    def check(count: int) -> str | None:
        asked.append(count)
        return f"wrong with {count}" if count >= first else None

    expected = None if first > passes else Culprit(first, f"wrong with {first}")
    found = first_failure(passes, check)
    assert found == expected or (first == 0 and found == Culprit(0, "wrong with 0"))
    assert len(asked) <= 2 + passes.bit_length()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    graph, passes = tmp_path / "step.pt", tmp_path / "bisected_passes.py"
    save_graph(training_step(2), graph)
    passes.write_text(PASSES)
    return graph, passes


def test_a_saved_graph(files: tuple[Path, Path], tmp_path: Path) -> None:
    graph, passes = files
    pipeline = "right_one -> right_one -> wrong_one -> right_one"
    out = tmp_path / "before.pt"
    arguments = [str(graph), "--pipeline", pipeline, "--import", str(passes), "--out", str(out)]
    result = CliRunner().invoke(app, ["bisect", *arguments])
    assert result.exit_code == 0, result.output
    assert "pass 3 of 4, wrong_one, is the first that makes it fail" in result.output
    assert "aten.mul.Tensor" in result.output
    assert out.is_file()


def test_a_command() -> None:
    """The exit status says whether it is as it should be."""
    script = "import os, sys; sys.exit(int(os.environ['GRAPHOPT_STOP_AFTER']) >= 2)"
    pipeline = "comm_fusion_with_concat -> schedule_comm_wait"
    arguments = ["--pipeline", pipeline, "--", sys.executable, "-c", script]
    result = CliRunner().invoke(app, ["bisect", *arguments])
    assert "pass 2 of 2, schedule_comm_wait" in result.output
