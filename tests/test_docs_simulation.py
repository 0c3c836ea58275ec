"""docs/simulation.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "simulation.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


def run(code: str, path: Path, namespace: dict[str, Any]) -> None:
    path.write_text(code)
    exec(compile(code, str(path), "exec"), namespace)


def test_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, code), (_, printed), (_, further) = BLOCKS
    namespace: dict[str, Any] = {"__name__": "example"}
    run(code, tmp_path / "example.py", namespace)
    assert capsys.readouterr().out == printed
    monkeypatch.chdir(tmp_path)
    run(further, tmp_path / "further.py", namespace)
    assert "measured: step" in (tmp_path / "step.html").read_text()
    timeline = namespace["timeline"]
    for name in ("trace.json", "page.html"):
        save = timeline.save_chrome_trace if name.endswith("json") else timeline.to_html
        save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
