"""Source lines of saved graphs, which keep their text: the program may not be on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphopt.ir.source import SourceLine


@dataclass(frozen=True)
class SavedLine(SourceLine):
    """A line of the program that a graph was captured from, as it was when the graph was saved."""

    text: str = ""

    @property
    def code(self) -> str:
        return self.text


def encode_line(line: SourceLine) -> list[Any]:
    """A line of a program as JSON, with its text."""
    return [line.file, line.line, line.function, line.code]


def decode_line(data: list[Any]) -> SavedLine:
    """The line that `encode_line` has written."""
    file, line, function, text = data
    return SavedLine(str(file), int(line), str(function), str(text))
