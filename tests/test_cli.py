"""The `graphopt` command: what it accepts, what it passes on, and what it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import graphopt
from graphopt import cli
from graphopt.demo import main as demo_main

COMMANDS = sorted(typer.main.get_group(cli.app).commands)

LOAD_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cli", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["cli"] = module
spec.loader.exec_module(module)
print(sorted({"torch", "graphopt"} & set(sys.modules)))
"""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the demo is asked to do. It does not run: only the way to it is tested here."""
    received: list[dict[str, Any]] = []

    def record(**request: Any) -> int:
        received.append(request)
        return request["seed"]

    monkeypatch.setattr(demo_main, "run_demo", record)
    return received


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output == f"graphopt {graphopt.__version__}\n"


def test_help_lists_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"graphopt {name}" in result.output.partition("Examples:")[2]


def test_python_m_graphopt() -> None:
    command = [sys.executable, "-m", "graphopt", "--version"]
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert result.stdout == f"graphopt {graphopt.__version__}\n", result.stderr


def test_the_command_line_itself_needs_no_torch() -> None:
    command = [sys.executable, "-c", LOAD_ALONE, cli.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_demo_defaults(requests: list[dict[str, Any]]) -> None:
    assert invoke("demo").exit_code == 0
    assert requests == [
        {
            "ranks": 2,
            "steps": 60,
            "device": "cpu",
            "backend": "gloo",
            "pipeline": "default",
            "link": None,
            "seed": 0,
        }
    ]


def test_demo_examples_are_accepted(requests: list[dict[str, Any]]) -> None:
    lines = [line.split() for line in cli.DEMO_EXAMPLES.splitlines() if "graphopt" in line]
    for words in lines:
        assert invoke(*words[1:]).exit_code == 0, words
    assert len(requests) == len(lines) > 2


def test_demo_on_cuda_uses_nccl(requests: list[dict[str, Any]]) -> None:
    invoke("demo", "--device", "cuda")
    invoke("demo", "--device", "cuda", "--backend", "gloo")
    assert [request["backend"] for request in requests] == ["nccl", "gloo"]


def test_exit_status_is_the_demos(requests: list[dict[str, Any]]) -> None:
    assert invoke("demo", "--seed", "3").exit_code == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "--ranks"),
        ("--steps -1", "--steps"),
        ("--steps many", "--steps"),
        ("--device tpu", "--device"),
        ("--backend mpi", "--backend"),
        ("--backend nccl", "add --device cuda"),
        ("--nope", "--nope"),
        ("file.py", "file.py"),
    ],
)
def test_bad_options(requests: list[dict[str, Any]], words: str, message: str) -> None:
    result = invoke("demo", *words.split())
    assert result.exit_code == 2
    assert message in result.output
    assert requests == []


def test_unknown_command() -> None:
    result = invoke("dmeo")
    assert result.exit_code == 2
    assert "dmeo" in result.output
