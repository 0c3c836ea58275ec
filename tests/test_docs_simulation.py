"""docs/simulation.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "simulation.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, code), (_, printed) = BLOCKS
    path = tmp_path / "example.py"
    path.write_text(code)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(path), "exec"), namespace)
    assert capsys.readouterr().out == printed
    timeline = namespace["timeline"]
    for name in ("trace.json", "page.html"):
        save = timeline.save_chrome_trace if name.endswith("json") else timeline.to_html
        save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
