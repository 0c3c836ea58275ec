"""The `graphopt` command: what it accepts, passes on and shows; `graphopt bisect`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from typer.testing import CliRunner, Result

import graphopt
from graphopt import cli
from graphopt.cli import app, demo
from graphopt.commands.bisect import Culprit, first_failure
from graphopt.demo import main as demo_main
from graphopt.graph_utils import call_function_with_meta
from graphopt.iter_graph import IterGraphModule
from graphopt.manager import applied_passes, default_registry
from graphopt.readable import graph_diff, graph_text
from graphopt.saved import load_graph, save_graph
from graphopt.schedule import collectives_text, simulate
from graphs import training_step
from registry import isolate

COMMANDS = sorted(typer.main.get_group(cli.app).commands)


LOAD = "import sys, graphopt.cli; print(sorted({'torch', 'networkx'} & set(sys.modules)))"


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
    command = [sys.executable, "-c", LOAD]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


def test_demo_defaults(requests: list[dict[str, Any]]) -> None:
    assert invoke("demo").exit_code == 0
    assert requests == [
        {"ranks": 2, "rounds": 3, "links": "0,0.5,1,2", "pipeline": "default", "seed": 0}
    ]


def test_demo_examples_are_accepted(requests: list[dict[str, Any]]) -> None:
    lines = [line.split() for line in demo.EXAMPLES.splitlines() if "graphopt" in line]
    for words in lines:
        assert invoke(*words[1:]).exit_code == 0, words
    assert len(requests) == len(lines) > 2


def test_exit_status_is_the_demos(requests: list[dict[str, Any]]) -> None:
    assert invoke("demo", "--seed", "3").exit_code == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "--ranks"),
        ("--rounds -1", "--rounds"),
        ("--rounds many", "--rounds"),
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


def small_graph() -> fx.GraphModule:
    """`x.t().t() + 1`."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta.update(val=torch.zeros(2, 3), kind="user_input")
    for target, args in (
        (torch.ops.aten.t.default, ()),
        (torch.ops.aten.t.default, ()),
        (torch.ops.aten.add.Tensor, (1,)),
    ):
        value = call_function_with_meta(graph, target, (value, *args))
        value.meta["phase"] = "forward"
    graph.output(([value], [], []))
    return fx.GraphModule(nn.Module(), graph)


PASSES = """
import graphopt.manager

@graphopt.manager.graph_optimization_pass(repeatable=True, changes_numerics=True)
def tidy_for_tests(gm, most: int = 3, name: str | None = None) -> int:
    "Read x in place of t(t(x))."
    first, second = [n for n in gm.graph.nodes if n.name.startswith("t_")]
    second.replace_all_uses_with(first.args[0])
    return 1

@graphopt.manager.graph_optimization_pass(apply_after=["tidy_for_tests"])
def hoist_for_tests(gm):
    list(gm.graph.nodes)[1].prepend(list(gm.graph.nodes)[3])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a saved graph and a file of passes, which are forgotten later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_REPRO", "graphopt-repro")
    save_graph(small_graph(), "step.pt")
    Path("my_passes_for_tests.py").write_text(PASSES)
    isolate(monkeypatch)
    monkeypatch.delitem(sys.modules, "my_passes_for_tests", raising=False)
    return tmp_path


IMPORT = ("--import", "my_passes_for_tests.py")


def test_passes_are_listed(folder: Path) -> None:
    result = invoke("passes", *IMPORT)
    assert result.exit_code == 0
    assert all(name in result.output for name in default_registry().names())
    text = " ".join(result.output.split())
    assert "tidy_for_tests Read x in place of t(t(x)). changes" in text
    assert "most: int = 3 name: str | None = None may be applied more than once" in text
    assert "after tidy_for_tests" in text


def test_it_is_said_of_each_pass_if_bits_stay(folder: Path) -> None:
    described = {entry["name"]: entry for entry in json.loads(invoke("passes", "--json").output)}
    words = " ".join(invoke("passes", *IMPORT).output.split())
    changing = {name for name, entry in described.items() if entry["changes_numerics"]}
    assert words.count(" changes ") >= len(changing) + 1  # the one that is imported
    assert words.count("same bits") == len(described) - len(changing) + 1


def test_passes_as_json(folder: Path) -> None:
    result = invoke("passes", "--json", *IMPORT)
    passes = {entry["name"]: entry for entry in json.loads(result.output)}
    assert sorted(passes) == default_registry().names()
    assert passes["tidy_for_tests"] == {
        "name": "tidy_for_tests",
        "what": "Read x in place of t(t(x)).",
        "options": [
            {"name": "most", "type": "int", "default": 3},
            {"name": "name", "type": "str | None", "default": None},
        ],
        "prerequisites": [],
        "apply_after": [],
        "apply_before": [],
        "repeatable": True,
        "changes_numerics": True,
        "changes_communication": False,
        "whole_step": False,
        "bakes_rank": False,
        "module": "my_passes_for_tests",
    }
    assert passes["hoist_for_tests"]["apply_after"] == ["tidy_for_tests"]


def test_optimize(folder: Path) -> None:
    result = invoke(
        "optimize", "step.pt", *IMPORT, "--pipeline", "tidy_for_tests(most=2)", "--out", "out.pt"
    )
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0] == "pass changes ms nodes launches peak MiB"
    assert re.match(r"tidy_for_tests 1 [\d.]+ 5→3 0 ", lines[1])
    assert "before: 5 nodes, 0 collectives, 0 state updates, 0 late nodes" in lines
    assert "after: 3 nodes, 0 collectives, 0 state updates, 0 late nodes" in lines
    assert lines[-1] == "saved: out.pt"
    saved = load_graph("out.pt")
    assert applied_passes(saved) == ["tidy_for_tests"]
    again = invoke("optimize", "out.pt", *IMPORT, "--pipeline", "none")
    assert again.output.startswith("applied before: tidy_for_tests\n")


def test_optimize_by_default(folder: Path) -> None:
    result = invoke("optimize", "step.pt", "--pipeline", "default", "--out", "out.pt")
    assert result.exit_code == 0, result.output
    saved = load_graph("out.pt")
    assert isinstance(saved, IterGraphModule)
    assert "schedule_comm_wait" in applied_passes(saved)


def test_optimize_options(folder: Path) -> None:
    pipeline = ("--pipeline", "tidy_for_tests -> hoist_for_tests")
    stopped = invoke("optimize", "step.pt", *IMPORT, *pipeline, "--stop-after", "1", "--dump", "d")
    assert stopped.exit_code == 0, stopped.output
    assert "hoist_for_tests" not in stopped.output
    assert Path("d/after_tidy_for_tests.txt").is_file()
    disabled = invoke("optimize", "step.pt", *IMPORT, *pipeline, "--disable", "hoist_for_tests")
    assert disabled.exit_code == 0, disabled.output


def test_optimize_refuses_a_wrong_pass(folder: Path) -> None:
    result = invoke("optimize", "step.pt", *IMPORT, "--pipeline", "hoist_for_tests")
    assert result.exit_code == 1
    assert "graphopt optimize: pass 'hoist_for_tests' was refused" in result.output
    assert "%t_default" in result.output
    assert Path("graphopt-repro/01.pt").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimize nothing.pt --pipeline none", "nothing.pt cannot be read: No such file"),
        ("optimize my_passes_for_tests.py --pipeline none", "does not hold a graph"),
        ("optimize step.pt --pipeline remove_copies_from_optimizer", "did you mean"),
        ("optimize step.pt --pipeline (", "a pass is expected here"),
        ("optimize step.pt --pipeline none --disable nothing", "'nothing', which is not a pass"),
        ("optimize step.pt --pipeline none --verify maybe", "--verify"),
        ("optimize step.pt --pipeline none --stop-after -1", "--stop-after"),
        ("optimize step.pt --pipeline none --import nowhere", "No module named 'nowhere'"),
        ("optimize step.pt", "--pipeline"),
        ("show nothing.pt", "nothing.pt cannot be read: No such file"),
        ("show step.pt --phase sideways", "--phase"),
        ("show step.pt --phase forward --diff step.pt", "--phase does not go with --diff"),
        ("show step.pt --diff nothing.pt", "nothing.pt cannot be read: No such file"),
        ("passes --import nowhere.py", "graphopt passes: --import nowhere.py"),
    ],
)
def test_misuse(folder: Path, words: str, message: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert message in result.output


def test_show(folder: Path) -> None:
    shown = load_graph("step.pt")
    text = graph_text(shown) + collectives_text(simulate(shown))
    assert invoke("show", "step.pt").output == text
    forward = invoke("show", "step.pt", "--phase", "forward").output
    assert "%t_default" in forward and "── output ──" not in forward


def test_show_a_difference(folder: Path) -> None:
    invoke("optimize", "step.pt", *IMPORT, "--pipeline", "tidy_for_tests", "--out", "out.pt")
    result = invoke("show", "step.pt", "--diff", "out.pt")
    graphs = (load_graph("step.pt"), load_graph("out.pt"))
    assert result.output == graph_diff(*graphs, ("step.pt", "out.pt"))
    assert "-%t_default = aten.t.default(%x)" in result.output
    assert invoke("show", "step.pt", "--diff", "step.pt").output == "no difference\n"


SCALING_PASSES = '''
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
    passes.write_text(SCALING_PASSES)
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


def test_a_graph_is_bisected_over_late_work(files: tuple[Path, Path]) -> None:
    graph, _ = files
    result = CliRunner().invoke(app, ["bisect", str(graph), "--pipeline", "default"])
    assert "nothing fails with all" in result.output, result.output


@pytest.mark.parametrize("pipeline", ["none", ""])
def test_a_graph_on_which_no_pass_runs_has_no_culprit(
    files: tuple[Path, Path], pipeline: str
) -> None:
    graph, _ = files
    result = CliRunner().invoke(app, ["bisect", str(graph), "--pipeline", pipeline])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "pass" in result.output


def test_a_saved_graph_without_a_pipeline_is_bisected_without_a_traceback(
    files: tuple[Path, Path],
) -> None:
    graph, _ = files
    result = CliRunner().invoke(app, ["bisect", str(graph)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output


def test_a_command() -> None:
    """The exit status says whether it is as it should be."""
    script = "import os, sys; sys.exit(int(os.environ['GRAPHOPT_STOP_AFTER']) >= 2)"
    pipeline = "comm_fusion_with_concat -> schedule_comm_wait"
    arguments = ["--pipeline", pipeline, "--", sys.executable, "-c", script]
    result = CliRunner().invoke(app, ["bisect", *arguments])
    assert "pass 2 of 2, schedule_comm_wait" in result.output
