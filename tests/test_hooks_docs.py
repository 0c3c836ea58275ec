"""docs/hooks.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from registry import isolate

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs" / "hooks.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


def test_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    isolate(monkeypatch)
    torch._dynamo.reset()
    namespace: dict[str, Any] = {"__name__": "hooks_document"}
    printed = ""
    for number, (language, code) in enumerate(BLOCKS):
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


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        assert (ROOT / "docs" / target).is_file(), target
    headings = re.findall(r"^#+ (.*)$", DOCUMENT, flags=re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT)) <= anchors
