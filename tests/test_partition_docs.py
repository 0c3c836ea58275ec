"""docs/partition.md tells the truth: its code runs and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "partition.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


def test_every_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert [language for language, _ in BLOCKS] == ["python", "text"] * (len(BLOCKS) // 2)
    namespace: dict[str, Any] = {"__name__": "split"}
    for (_, code), (_, shown) in zip(BLOCKS[::2], BLOCKS[1::2], strict=True):
        exec(compile(code, "partition.md", "exec"), namespace)
        assert capsys.readouterr().out == shown
