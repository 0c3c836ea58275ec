"""Sharded steps that are planned without their devices and ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import planned_steps
from graphopt.testing import pretended

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_default_pipeline_makes_it_faster(stage: int, tmp_path: Path) -> None:
    """Proven on the way; and its file can be shown by a process that has captured nothing."""
    path = str(tmp_path / "step.pt")
    found = pretended("cuda:90", ranks=64).run(planned_steps.planned, stage, path)
    before, after = found["seconds"]
    assert after < before
    before, after = found["collectives"]
    assert after < before / 2
    command = [sys.executable, "-m", "graphopt", "show", path]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "reduce_scatter_tensor_coalesced" in shown and "_fused_adamw" in shown
