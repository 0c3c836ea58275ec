"""The example under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "pipeline.py"


@pytest.mark.full
def test_the_example_trains_under_torchrun() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    options = ["--steps", "21", "--replicas", "2"]
    run = subprocess.run(
        [*launch, str(EXAMPLE), *options], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 4
