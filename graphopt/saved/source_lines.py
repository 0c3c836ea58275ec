"""Source lines in saved graphs, with their text: the program may be on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphopt.ir.source import SourceLine


@dataclass(frozen=True)
class SavedLine(SourceLine):
    """A source line of a captured program, with its text at the time of saving."""

    text: str = ""

    @property
    def code(self) -> str:
        return self.text


def encode_line(line: SourceLine) -> list[Any]:
    """The JSON form of a source line, with its text."""
    return [line.file, line.line, line.function, line.code]


def decode_line(data: list[Any]) -> SavedLine:
    """The source line of a JSON form."""
    file, line, function, text = data
    return SavedLine(str(file), int(line), str(function), str(text))
