"""`graphopt trace` and `graphopt lower`: tables, files, messages, exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner, Result

import graphopt
import zoo
from graphopt import cli
from graphopt.pipelining.schedule_timeline import SCHEDULES
from graphopt.saved import save_graph


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words, env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(result: Result) -> dict[str, list[str]]:
    """Cells of the table by schedule."""
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    start = next(index for index, words in enumerate(lines) if words[:1] == ["schedule"])
    return {words[0]: words[1:] for words in lines[start + 1 :] if words[0] in SCHEDULES}


def test_all_schedules() -> None:
    found = rows(invoke("trace"))
    assert list(found) == list(SCHEDULES)
    assert found["gpipe"] == ["4", "4", "33", "s", "27.3", "%"]
    assert found["interleaved"] == ["4", "8", "28.5", "s", "15.8", "%"]
    assert found["zbv"] == ["4", "8", "25.5", "s", "5.9", "%"]


def test_the_picture_in_the_documentation() -> None:
    document = Path(__file__).resolve().parent.parent / "docs" / "pipelining.md"
    picture = document.read_text().partition("## Pictures of schedules")[2].split("```")[1]
    result = invoke("trace", "--schedule", "Schedule1F1B", "--microbatches", "8")
    assert result.exit_code == 0
    assert result.output == picture.removeprefix("text\n")


def test_what_does_not_fit_is_named_beside_what_does() -> None:
    found = rows(invoke("trace", "--ranks", "4", "--microbatches", "2"))
    assert found["gpipe"][-1] == "%"
    assert " ".join(found["1f1b"]).startswith("1f1b cannot run 2 microbatches: Number of")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule fastest", "no schedule 'fastest'; known are gpipe, 1f1b, interleaved"),
        ("--schedule 1f1b --ranks 4 --microbatches 2", "1f1b cannot run 2 microbatches"),
        ("--schedule interleaved --ranks 2 --microbatches 5", "interleaved cannot run 5 micro"),
        ("--schedule dualpipev --ranks 2 --microbatches 3", "dualpipev cannot run 3 micro"),
        ("--schedule zbv --stages 3", "zbv has two stages on each rank"),
        ("--schedule gpipe --ranks 2 --stages 3", "3 stages need 3 ranks"),
        ("--schedule interleaved --ranks 2 --stages 3", "cannot be divided among 2 ranks"),
        ("--forward fast", "'fast' is not a number"),
        ("--forward 1,2,3 --backward 1,2 --schedule gpipe", "one number for each stage"),
        ("--forward -1", "not less than 0"),
        ("--forward nan", "finite"),
        ("--microbatches 0", "--microbatches"),
    ],
)
def test_misuse(words: str, message: str) -> None:
    result = invoke("trace", *words.split())
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.fixture(autouse=True)
def _folder_and_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def softmax_and_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def save(module: fx.GraphModule) -> None:
    save_graph(module, "step.pt")


def save_function(dtype: torch.dtype = torch.float32) -> None:
    inputs = torch.randn(64, 48, dtype=dtype), torch.randn(48, 48, dtype=dtype)
    save(make_fx(softmax_and_product, tracing_mode="fake")(*inputs))


def save_step() -> None:
    case = zoo.MODELS["mlp"]
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(graphopt.capture(zoo.train_step, model, optimizer, *case.batch(0)).graph_module)


def test_files_and_table() -> None:
    save_function()
    result = invoke("lower", "step.pt", "--target", "cuda:80", "--out", "made/kernels")
    assert result.exit_code == 0, result.output
    said = json.loads(Path("made/kernels/kernels.json").read_text())
    (kernel,) = said["kernels"]
    name = kernel["name"]
    assert sorted(path.name for path in Path("made/kernels").iterdir()) == [
        "kernels.json",
        *(f"{name}.{suffix}" for suffix in ("cubin", "ptx", "py")),
    ]
    cubin = Path(f"made/kernels/{name}.cubin").read_bytes()
    assert cubin.startswith(b"\x7fELF") and kernel["cubin_bytes"] == len(cubin)
    assert ".target sm_80" in Path(f"made/kernels/{name}.ptx").read_text()
    assert f"def {name}(" in Path(f"made/kernels/{name}.py").read_text()
    assert said["target"] == "cuda:80" and said["regions"] == 1
    assert said["externs"] == {"mm": 1} and said["failures"] == []
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0] == ["kernel", "registers", "shared", "spills", "cubin"]
    figures = [str(kernel[key]) for key in ("shared_bytes", "spills", "cubin_bytes")]
    assert rows[1] == [name, str(kernel["registers"]), *figures]
    assert rows[2] == ["total", *figures]
    assert result.output.splitlines()[3:] == [
        "cuda:80: 1 kernels of 1 regions",
        "calls of libraries: 1 mm",
        "saved: made/kernels",
    ]


def test_a_saved_training_step() -> None:
    save_step()
    result = invoke("lower", "step.pt", "--out", "kernels", "--min-ops", "3")
    assert result.exit_code == 0, result.output
    said = json.loads(Path("kernels/kernels.json").read_text())
    assert said["regions"] >= 1 and len(said["kernels"]) > 3
    assert len(list(Path("kernels").glob("*.cubin"))) == len(said["kernels"])


@pytest.mark.filterwarnings("ignore:compute capability 7.5 does not support bfloat16")
def test_what_fails_is_named_and_the_status_is_1() -> None:
    save_function(torch.bfloat16)
    result = invoke("lower", "step.pt", "--target", "cuda:75", "--out", "kernels")
    assert result.exit_code == 1
    assert "graphopt lower: region 0: this cannot be lowered to Triton" in result.output
    (failure,) = json.loads(Path("kernels/kernels.json").read_text())["failures"]
    assert failure.startswith("region 0: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lower nothing.pt --out kernels", "nothing.pt cannot be read: No such file"),
        ("lower text.pt --out kernels", "does not hold a graph"),
        ("lower step.pt --out text.pt", "text.pt cannot be made: File exists"),
        ("lower step.pt --out kernels --target cuda:91", "there is no target 'cuda:91'; known are"),
        ("lower step.pt --out kernels --target rocm", "there is no target 'rocm'; known are"),
        ("lower step.pt --out kernels --min-ops 0", "--min-ops"),
        ("lower step.pt", "--out"),
        ("lower", "FILE"),
    ],
)
def test_misuse_of_lower(words: str, message: str) -> None:
    save_function()
    Path("text.pt").write_text("text")
    result = invoke(*words.split())
    assert result.exit_code == 2
    assert message in result.output
    assert not Path("kernels").exists()


def test_a_step_without_regions() -> None:
    save_step()
    result = invoke("lower", "step.pt", "--out", "kernels", "--min-ops", "1000")
    assert result.exit_code == 2
    assert "no region of 1000 operators" in result.output and "--min-ops" in result.output


def test_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    save_function()
    monkeypatch.setitem(sys.modules, "triton", None)
    result = invoke("lower", "step.pt", "--out", "kernels")
    assert result.exit_code == 2
    assert "pip install 'graphopt[triton]'" in result.output
