"""Pages of docs/ tell the truth: their code runs, prints what they show, and each row of the table
of what is refused is refused and cured."""

from __future__ import annotations

import logging
import random
import re
import shlex
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from typer.testing import CliRunner

import graphopt
from graphopt import cli
from registry import isolate

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLAYED = ("hooks", "lowering", "partition", "simulation", "writing_a_pass")
"""Pages whose blocks run in order and print what is shown under them."""


def blocks(page: str, language: str = "python") -> list[str]:
    return [code for found, code in all_blocks(page) if found == language]


def all_blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch itself warns of while it compiles
        exec(compile(code, str(path), "exec"), namespace)


def invoke(words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, shlex.split(words))
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.mark.parametrize("page", PLAYED)
def test_every_block_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_REPRO", "graphopt-repro")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    isolate(monkeypatch)
    torch._dynamo.reset()
    namespace: dict[str, Any] = {}
    printed = ""
    for number, (language, code) in enumerate(all_blocks(f"{page}.md")):
        if language == "python":
            run(code, number, tmp_path, namespace)
            printed += capsys.readouterr().out
        elif language == "text":
            assert normal(printed, tmp_path) == code.rstrip()
            printed = ""
        else:
            assert language == "bash"
            for line in code.splitlines():
                command, _, words = line.partition(" ")
                assert command == "graphopt"
                invoke(words)
    assert not printed, "this is printed, but not shown"
    # In a new process this imports the pass; here the pass replaces itself.
    for words in re.findall(r"reproduce: graphopt (.*)", (DOCS / f"{page}.md").read_text()):
        assert "pass 'products_first' was refused" in invoke(words, exit_code=1)
    torch._dynamo.reset()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!http)([^)#\s]+\.\w+)(?:#[^)]+)?\)", text):
        assert (DOCS / target).exists(), target
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


PAGE = (Path(__file__).parent.parent / "docs" / "step.md").read_text()
CODE = re.compile(r"`([^`]+)`")
STEP = """
def step(x, scale=1.0):
    loss = model(x * scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {line}
    return loss.detach()
"""


def rows() -> list[tuple[str, list[str]]]:
    """The lines that are refused, each with what to write instead."""
    table = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `")]
    return [(CODE.findall(before)[0], CODE.findall(after)) for _, before, _, after, _ in table]


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "file").write_text("1.5")
    found: dict[str, Any] = {
        "history": [], "recent": deque(), "seen": set(), "table": {}, "kept": {},
        "logger": logging.getLogger("a step"), "path": tmp_path / "file", "model": model,
        "scales": iter([1.0, 2.0, 3.0]), "optimizer": optimizer, "x": torch.ones(3, 2),
        "scheduler": StepLR(optimizer, 2), "graphopt": graphopt, "torch": torch, "np": np,
        "warnings": warnings, "random": random, "time": time,
    }  # fmt: skip
    return found


def compiled(line: str, names: dict[str, Any]) -> Any:
    exec(STEP.format(line=line), names)
    return graphopt.compile(names["step"])


@pytest.mark.parametrize("number", range(len(rows())))
@pytest.mark.filterwarnings("ignore:diverged", "ignore:Detected call of")
def test_each_row_is_refused_and_cured(number: int, names: dict[str, Any]) -> None:
    line, cures = rows()[number]
    first = line.split("graphopt")[0]
    assert cures and not first.startswith("graphopt")
    with pytest.raises(graphopt.CaptureError, match="hint:"):
        compiled(line, names)(names["x"])
    for cure in (each for each in cures if each != "step"):
        if "step(x" in cure:
            names["step"] = compiled("pass", names)
            exec(cure, names)
            exec(cure, names)
        elif "graphopt.callback" in cure or "=" in cure:
            step = compiled(cure, names)
            step(names["x"]), step(names["x"])


def test_the_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    left = []
    for wrap in (lambda function: function, graphopt.compile):
        torch.manual_seed(0)
        names: dict[str, Any] = {"F": F}
        exec(code, names)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        trainer = names["Trainer"](model, torch.optim.SGD(model.parameters(), lr=0.1))
        train = wrap(trainer.train)
        losses = [train(torch.randn(4, 2), torch.randn(4, 1)).item() for _ in range(4)]
        left.append([losses, trainer.steps, trainer.ema, trainer.logs["loss"].item()])
        left[-1].append(trainer.hidden.tolist())
    assert left[0] == left[1]


def test_the_readme_leads_to_the_page() -> None:
    assert "docs/step.md" in (Path(__file__).parent.parent / "README.md").read_text()
