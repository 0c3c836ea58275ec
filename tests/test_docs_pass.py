"""docs/writing_a_pass.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphopt import cli
from registry import isolate

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "writing_a_pass.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


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


def test_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHOPT_REPRO", "graphopt-repro")
    isolate(monkeypatch)
    namespace: dict[str, Any] = {}
    printed = ""
    for number, (language, code) in enumerate(BLOCKS):
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
    (reproduce,) = re.findall(r"reproduce: graphopt (.*)", DOCUMENT)
    result = CliRunner().invoke(cli.app, shlex.split(reproduce))
    assert result.exit_code == 1
    assert "pass 'products_first' was refused" in result.output


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        assert (ROOT / "docs" / target).is_file(), target
