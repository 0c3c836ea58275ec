"""File access with `~` expanded and errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphopt.errors import FileError, MissingFileError


def place(path: str | os.PathLike[str]) -> Path:
    """The path that a user means, with a leading ``~`` or ``~name`` expanded.

    Raises:
        FileError: this is no path.
    """
    try:
        return Path(path).expanduser()
    except (TypeError, RuntimeError) as error:  # the latter: there is no such user
        raise FileError(f"{path!r} is not the path of a file or folder: {error}") from None


def cache_folder() -> Path:
    """The folder for data that can be recomputed; not created here."""
    return place(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "graphopt"


@contextmanager
def named(path: Path, doing: str) -> Iterator[None]:
    """While active, an error of a file operation becomes a `FileError` that names the file.

    Args:
        doing: the operation on the file, as a participle: "read", "written".
    """
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} cannot be {doing}: {_reason(error)}") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name, text of no code
        raise FileError(f"{path} cannot be {doing}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def read_bytes(path: Path) -> bytes:
    with named(path, "read"):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The UTF-8 text of a file."""
    with named(path, "read"):
        return path.read_text(encoding="utf-8")


def write(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8; creates missing folders."""
    with named(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")


def make_folder(path: Path) -> None:
    """Creates a folder unless it exists."""
    with named(path, "made"):
        path.mkdir(parents=True, exist_ok=True)


def why_unwritable(folder: Path) -> str | None:
    """The reason why no file can be written to a folder, existing or not; None if one can."""
    try:
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    except (OSError, ValueError) as error:
        return _reason(error)
    if not existing.is_dir():
        return f"{'this' if existing == folder else existing} is a file, not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{'it' if existing == folder else existing} cannot be written to"
    return None
