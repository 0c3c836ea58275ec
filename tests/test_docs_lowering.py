"""docs/lowering.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
