"""Source lines of the user's program."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class SourceLine:
    """One line of a program. `code` is the stripped text, empty where the file cannot be read."""

    file: str
    line: int
    function: str

    @classmethod
    def of(cls, frame: FrameType) -> SourceLine:
        """The line that a frame is at."""
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    @property
    def code(self) -> str:
        """The text of the line, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.code}".rstrip()
