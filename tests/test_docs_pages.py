"""Pages of docs/ tell the truth: their code runs, and prints what they show."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import graphopt
from graphopt import cli
from registry import isolate

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


class Summed(nn.Linear):
    """Returns a loss."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch).sum()


def test_iterations() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    names: dict[str, Any] = {"torch": torch, "model": model, "loader": [(torch.ones(4, 3), 0)] * 3}
    step, reading = blocks("iterations.md")
    exec(step, names)
    summed = graphopt.compile(names["train_step"])
    other = Summed(3, 2)
    loss = summed(other, torch.optim.SGD(other.parameters(), lr=0.1), torch.ones(4, 3))
    assert loss.shape == ()

    @graphopt.compile
    def train_step(model: nn.Module, optimizer: Any, inputs: Tensor, targets: int) -> None:
        (model(inputs).sum() - targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    exec(reading, {**names, "optimizer": optimizer, "train_step": train_step})
    assert all(bool((p.abs() <= 1).all()) for p in model.parameters())


def test_verification(capsys: pytest.CaptureFixture[str]) -> None:
    (listing,) = blocks("verification.md")
    exec(listing, {})
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_the_tests_that_pages_name_are_there() -> None:
    for page in sorted(DOCS.glob("*.md")):
        for name in re.findall(r"\btest_\w+\b(?=`|\.py)", page.read_text()):
            own = name == "test_my_passes"  # The file that a reader writes.
            assert own or (Path(__file__).parent / f"{name}.py").exists(), (page.name, name)


DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "lowering.md").read_text()


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


def test_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "blocks"}
    for number, (language, code) in enumerate(BLOCKS):
        if language == "text":
            assert capsys.readouterr().out.rstrip() == code.rstrip()
            continue
        path = tmp_path / f"block_{number}.py"
        path.write_text(code)
        exec(compile(code, str(path), "exec"), namespace)


ROOT = Path(__file__).resolve().parent.parent


DOCUMENT_OF_DOCS_PASS = (ROOT / "docs" / "writing_a_pass.md").read_text()


BLOCKS_OF_DOCS_PASS = re.findall(
    r"^```(\w*)\n(.*?)^```$", DOCUMENT_OF_DOCS_PASS, flags=re.MULTILINE | re.DOTALL
)


def normal(text: str, folder: Path) -> str:
    """Printed text without what differs between runs and machines."""
    text = text.replace(f"{folder}/", "")
    return re.sub(r"\d+\.\d{3} s", "0.001 s", text).rstrip()


def run(code: str, number: int, folder: Path, namespace: dict[str, Any]) -> None:
    """Run one block as the file that its first line names."""
    named = re.match(r"# (\w+\.py)\n", code)
    path = folder / (named.group(1) if named else f"block_{number}.py")
    path.write_text(code)
    namespace["__name__"] = path.stem
    exec(compile(code, str(path), "exec"), namespace)


def test_every_block_of_docs_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_REPRO", "graphopt-repro")
    isolate(monkeypatch)
    namespace: dict[str, Any] = {}
    printed = ""
    for number, (language, code) in enumerate(BLOCKS_OF_DOCS_PASS):
        if language == "python":
            assert printed == "", "this is printed, but not shown"
            run(code, number, tmp_path, namespace)
            printed = normal(capsys.readouterr().out, tmp_path)
        elif language == "text":
            assert printed == code.rstrip()
            printed = ""
        else:
            assert language == "bash"
            for line in code.splitlines():
                command, *words = shlex.split(line)
                assert command == "graphopt"
                result = CliRunner().invoke(cli.app, words)
                assert result.exit_code == 0, result.output
    # In a new process this imports the pass; here the pass replaces itself.
    (reproduce,) = re.findall(r"reproduce: graphopt (.*)", DOCUMENT_OF_DOCS_PASS)
    result = CliRunner().invoke(cli.app, shlex.split(reproduce))
    assert result.exit_code == 1
    assert "pass 'products_first' was refused" in result.output


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT_OF_DOCS_PASS):
        assert (ROOT / "docs" / target).is_file(), target


DOCUMENT_OF_DOCS_SIMULATION = (
    Path(__file__).resolve().parent.parent / "docs" / "simulation.md"
).read_text()


BLOCKS_OF_DOCS_SIMULATION = re.findall(
    r"^```(\w+)\n(.*?)^```$", DOCUMENT_OF_DOCS_SIMULATION, flags=re.MULTILINE | re.DOTALL
)


def run_of_docs_simulation(code: str, path: Path, namespace: dict[str, Any]) -> None:
    path.write_text(code)
    exec(compile(code, str(path), "exec"), namespace)


def test_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, code), (_, printed), (_, further) = BLOCKS_OF_DOCS_SIMULATION
    namespace: dict[str, Any] = {"__name__": "example"}
    run_of_docs_simulation(code, tmp_path / "example.py", namespace)
    assert capsys.readouterr().out == printed
    monkeypatch.chdir(tmp_path)
    run_of_docs_simulation(further, tmp_path / "further.py", namespace)
    assert "measured: step" in (tmp_path / "step.html").read_text()
    timeline = namespace["timeline"]
    for name in ("trace.json", "page.html"):
        save = timeline.save_chrome_trace if name.endswith("json") else timeline.to_html
        save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0


DOCUMENT_OF_HOOKS_DOCS = (ROOT / "docs" / "hooks.md").read_text()


BLOCKS_OF_HOOKS_DOCS = re.findall(
    r"^```(\w*)\n(.*?)^```$", DOCUMENT_OF_HOOKS_DOCS, flags=re.MULTILINE | re.DOTALL
)


def test_every_block_of_hooks_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    isolate(monkeypatch)
    torch._dynamo.reset()
    namespace: dict[str, Any] = {"__name__": "hooks_document"}
    printed = ""
    for number, (language, code) in enumerate(BLOCKS_OF_HOOKS_DOCS):
        if language == "text":
            assert printed == code
            printed = ""
            continue
        assert language == "python"
        assert printed == "", "this is printed, but not shown"
        path = tmp_path / f"block_{number}.py"
        path.write_text(code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch itself warns of while it compiles
            exec(compile(code, str(path), "exec"), namespace)
        printed = capsys.readouterr().out
    assert printed == ""
    torch._dynamo.reset()


def test_links_lead_somewhere_of_hooks_docs() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT_OF_HOOKS_DOCS):
        assert (ROOT / "docs" / target).is_file(), target
    headings = re.findall(r"^#+ (.*)$", DOCUMENT_OF_HOOKS_DOCS, flags=re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT_OF_HOOKS_DOCS)) <= anchors


DOCUMENT_OF_PARTITION_DOCS = (
    Path(__file__).resolve().parent.parent / "docs" / "partition.md"
).read_text()


BLOCKS_OF_PARTITION_DOCS = re.findall(
    r"^```(\w*)\n(.*?)^```$", DOCUMENT_OF_PARTITION_DOCS, flags=re.MULTILINE | re.DOTALL
)


def test_every_block_of_partition_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert [language for language, _ in BLOCKS_OF_PARTITION_DOCS] == ["python", "text"] * (
        len(BLOCKS_OF_PARTITION_DOCS) // 2
    )
    namespace: dict[str, Any] = {"__name__": "split"}
    for (_, code), (_, shown) in zip(
        BLOCKS_OF_PARTITION_DOCS[::2], BLOCKS_OF_PARTITION_DOCS[1::2], strict=True
    ):
        exec(compile(code, "partition.md", "exec"), namespace)
        assert capsys.readouterr().out == shown
