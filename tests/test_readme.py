"""The README tells the truth: its code runs, and what it tells people to type exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.distributed.run import get_args_parser

import graphopt
from graphopt import cli
from registry import isolate

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SCRIPTS = [code for code in PYTHON if "init_process_group" in code]
COMMANDS = [
    shlex.split(line)
    for language, code in BLOCKS
    if language == "bash"
    for line in code.splitlines()
]


def test_every_block_is_covered() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "bash", "text"}
    assert len(SCRIPTS) == 1
    assert {words[0] for words in COMMANDS} == {"make", "torchrun"}


def test_order_of_sections() -> None:
    titles = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert titles == [
        "What it gains",
        "When not to use it",
        "Try it",
        "A pass of your own",
        "On several GPUs",
        "What a step may do",
        "Status",
        "Docs",
    ]
    assert README.index("```python") < README.index("## What it gains")
    assert len(README.splitlines()) <= 200


def test_training_blocks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks follow one another in one program, which learns what it is shown."""
    isolate(monkeypatch)
    namespace: dict[str, object] = {}
    for number, code in enumerate(block for block in PYTHON if block not in SCRIPTS):
        exec(compile(code, f"<README block {number}>", "exec"), namespace)
    assert isinstance(namespace["train_step"], graphopt.TrainStep)
    loss = namespace["loss"]
    assert isinstance(loss, torch.Tensor)
    # The targets are sums of eight standard normal numbers: variance 8.
    assert loss.item() < 1.0
    printed = capsys.readouterr().out
    assert "schedule_comm_wait: " in printed
    assert "cancel_transposes: " in printed


def test_the_wrong_pass_is_refused_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    namespace: dict[str, Any] = {"__name__": "train"}
    blocks = [block for block in PYTHON if block not in SCRIPTS]
    exec(compile(blocks[0], "<README block>", "exec"), namespace)
    wrong = re.sub(r"if is_operator\(inner.*:", "if inner.args:", blocks[1])
    assert wrong != blocks[1]
    with pytest.raises(graphopt.VerificationError) as refused:
        exec(compile(wrong, "<README wrong pass>", "exec"), namespace)
    shown = next(code for language, code in BLOCKS if language == "text")
    said = str(refused.value).splitlines()
    assert said[:3] == shown.splitlines()[:3]
    names = [line.partition(":")[0] for line in shown.splitlines()[3:]]
    of_a_file = {"  from"}
    assert set(names) - of_a_file <= {line.partition(":")[0] for line in said}


def test_the_script_on_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the only rank, in this process and on its CPU."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(compile(SCRIPTS[0], "<README script>", "exec"), {})
    said = re.fullmatch(r"rank 0 of 1: loss (\d\.\d{4})\n", capsys.readouterr().out)
    assert said is not None and float(said[1]) < 1.0


@pytest.mark.full
def test_torchrun_script(tmp_path: Path) -> None:
    """The script, started by the command that the README gives, but on this machine's CPU."""
    command = next(words for words in COMMANDS if words[0] == "torchrun")
    (tmp_path / "train.py").write_text(SCRIPTS[0])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    # The ranks share one stream, on which a line and its end may come apart.
    losses = dict(re.findall(r"rank (\d) of 2: loss (\d\.\d{4})", result.stdout))
    assert sorted(losses) == ["0", "1"]
    assert all(float(loss) < 1.0 for loss in losses.values())


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = {words[1] for words in COMMANDS if words[0] == "make"}
    named |= set(re.findall(r"`make ([\w-]+)", README))
    assert named == {"demo", "test"}
    assert named <= set(targets)


def test_torchrun_options_exist() -> None:
    for words in COMMANDS:
        if words[0] == "torchrun":
            parsed = get_args_parser().parse_args(words[1:])
            assert parsed.training_script == "train.py"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_commands_exist() -> None:
    named = set(re.findall(r"`graphopt (\w+)", README))
    assert named == {"estimate"}
    assert named <= set(typer.main.get_group(cli.app).commands)
