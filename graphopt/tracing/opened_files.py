"""Files that a step opens to write, and closes: each call opens, writes and closes them.

with open(path, "a") as file:          open, write and close are calls on the host, as writing
    file.write(f"{loss.item()}")       to a file is that is open when the step begins
"""

from __future__ import annotations

import csv
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from graphopt.errors import CaptureError
from graphopt.ir.source import SourceLine
from graphopt.tracing.later import Later
from graphopt.tracing.numbers import refusal
from graphopt.tracing.outside.record import Record
from graphopt.tracing.replace import original
from graphopt.tracing.said import FileInTrace, call_named, hand_on
from graphopt.tracing.source import current_user_line, is_library_file

_HINT = "write to it within `with open(path, mode) as file:`; or in graphopt.callback(function, …)"


class FileOfCall(threading.local):
    """A file that is open while a step is running: another one in each call and thread."""

    _file: Any = None

    def open(self, *args: Any, **options: Any) -> None:
        """Open it, as the builtin does."""
        self.close()
        self._file = open(*args, **options)  # noqa: SIM115 - another call closes it

    def write(self, text: Any) -> Any:
        """Write into it. Returns how much."""
        return self._file.write(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        self._file.writelines(lines)

    def flush(self) -> None:
        """Hand on what has been written."""
        self._file.flush()

    def close(self) -> None:
        """Close it, where it is open."""
        if self._file is not None:
            self._file.close()


_OPEN = io.open
_FILES = tuple(FileOfCall() for _ in range(8))
"""The first that is open at a time, the second, …: those of all steps."""


class OpenedFile(FileInTrace):
    """Stands for such a file while a step is traced."""

    def __init__(self, record: Record, of_calls: FileOfCall, mode: str) -> None:
        self._record, self.of_calls, self.closed = record, of_calls, False
        text = "I/O operation on closed file."
        self._closed = "write to closed file" if "b" in mode else text
        self.line = current_user_line()

    def do(self, function: Callable[..., Any], *args: Any) -> None:
        """Let each call do something with the file."""
        if self.closed:
            raise ValueError(self._closed)
        hand_on(self._record, call_named, function, self.of_calls, *args)

    def kept(self, row: Any) -> Any:
        """A row that the step has made, of which nothing is to hold the list."""
        made = isinstance(row, Iterator) or type(row) is list
        return tuple(row) if made and not self._record.is_outside(row) else row

    def write(self, text: Any) -> Any:
        self.do(FileOfCall.write, text)
        return Later(len, (text,), is_number=True)

    def writelines(self, lines: Any) -> None:
        self.do(FileOfCall.writelines, list(lines))

    def flush(self) -> None:
        self.do(FileOfCall.flush)

    def close(self) -> None:
        if not self.closed:
            self.do(FileOfCall.close)
        self.closed = True

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        raise refusal(f"it asks a file that it writes for its {name}", _HINT)


class TableInFile:
    """Stands for what `csv.writer` gives for such a file."""

    def __init__(self, file: OpenedFile, *args: Any, **options: Any) -> None:
        self._file, self._how = file, (args, tuple(options.items()))

    def writerow(self, row: Any) -> None:
        self._file.do(_write_rows, *self._how, (self._file.kept(row),))

    def writerows(self, rows: Any) -> None:
        self._file.do(_write_rows, *self._how, tuple(map(self._file.kept, rows)))


_OF_LATER = (
    *(OpenedFile.write, OpenedFile.writelines),
    *(TableInFile.writerow, TableInFile.writerows),
)
for _method in _OF_LATER:
    vars(_method)["of_later"] = True


def _write_rows(file: Any, args: Any, options: Any, rows: Any) -> None:
    csv.writer(file, *args, **dict(options)).writerows(rows)


class OpenedFiles:
    """Those of one trace.

    Args:
        changes: is told that the step changes files.
    """

    def __init__(self, record: Record, changes: Callable[[], None]) -> None:
        self._record, self._changes = record, changes
        self._all: list[OpenedFile] = []

    def called(
        self, callee: Any, args: Sequence[Any], line: SourceLine
    ) -> Callable[..., Any] | None:
        """What is called in place of a function that opens such a file, or writes to it; None for
        others."""
        if callee is csv.writer and args and isinstance(args[0], OpenedFile):
            return TableInFile
        if callee is json.dump and any(isinstance(each, OpenedFile) for each in args):
            return self._dump
        while original(callee) is not callee:
            callee = original(callee)
        to_write = callee is _OPEN and any(map(_is_mode, args[1:2]))
        return self._open if to_write and not is_library_file(line.file) else None

    def _open(self, file: Any, mode: str, *args: Any, **options: Any) -> OpenedFile:
        self._changes()
        used = [each.of_calls for each in self._all if not each.closed]
        free = [each for each in _FILES if each not in used]
        if not free or not isinstance(file, (str, PurePath)):
            raise refusal("it opens a file that has no name, or more than 8 at a time", _HINT)
        path = os.fspath(file) if isinstance(file, PurePath) else file
        hand_on(self._record, call_named, FileOfCall.open, free[0], path, mode, *args, **options)
        self._all.append(OpenedFile(self._record, free[0], mode))
        return self._all[-1]

    def _dump(self, obj: Any, fp: OpenedFile, **options: Any) -> None:
        hand_on(self._record, call_named, json.dump, obj, fp, **options)

    def finish(self) -> None:
        """The step is over."""
        lines = [str(each.line) for each in self._all if not each.closed]
        self._all.clear()
        if lines:
            what = "it leaves a file open that it writes"
            raise CaptureError(what, location=lines[0], hint=_HINT)


def _is_mode(mode: Any) -> bool:
    return type(mode) is str and not set(mode).isdisjoint("wax") and "+" not in mode
