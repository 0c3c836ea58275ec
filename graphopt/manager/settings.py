"""Settings of a `PassManager`: from arguments, else from environment variables."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphopt.errors import FileError, PipelineSyntaxError
from graphopt.ir import user_files as places
from graphopt.manager.declaration import Pass
from graphopt.manager.names import suggestion

logger = logging.getLogger("graphopt")

LEVELS = ("off", "dependencies", "equivalence")


@dataclass(frozen=True)
class Settings:
    """The settings by which pipelines run.

    Attributes:
        verify: one of `LEVELS`.
        dump_dir: where the graph is written after each pass; None: nowhere.
        dump_required: whether a run fails where that cannot be done: if a program asks for it, and
            not where the environment does.
        disable: names of passes that are left out.
        stop_after: how many passes run at most; None: all.
    """

    verify: str
    dump_dir: Path | None
    dump_required: bool
    disable: frozenset[str]
    stop_after: int | None


def read_settings(
    *,
    verify: str | None,
    dump_dir: str | os.PathLike[str] | None,
    disable: Iterable[str | Pass],
    stop_after: int | None,
    known: Callable[[], Iterable[str]],
) -> Settings:
    """Reads settings from arguments, then the environment, then defaults.

    Args:
        verify, dump_dir, disable, stop_after: as of `PassManager`.
        known: gives the names of passes that `disable` may name.

    Raises:
        PipelineSyntaxError: a value cannot be understood; says where it comes from.
    """
    level = level_of(verify)
    folder, folder_place = _given(dump_dir or None, "dump_dir", "GRAPHOPT_DUMP")
    names, names_place = _given(disable or None, "disable", "GRAPHOPT_DISABLE")
    count, count_place = _given(stop_after, "stop_after", "GRAPHOPT_STOP_AFTER")
    return Settings(
        level,
        _folder(folder, folder_place),
        dump_dir is not None,
        _disabled(names, names_place, known),
        _count(count, count_place),
    )


def level_of(verify: str | None) -> str:
    """Returns the verification level, one of `LEVELS`: the argument, else `GRAPHOPT_VERIFY`.

    Raises:
        PipelineSyntaxError: there is no such level; says where it comes from.
    """
    level, place = _given(verify, "verify", "GRAPHOPT_VERIFY")
    if level is None:
        return "equivalence"
    if level not in LEVELS:
        raise PipelineSyntaxError(f"{place}={level!r}: one of {', '.join(LEVELS)} is expected")
    return str(level)


def enable_graph_optimization_dump(folder: str | os.PathLike[str] = "") -> Path:
    """Makes every `PassManager` created from now on write the graph after each pass.

    This sets `GRAPHOPT_DUMP`, which processes that are started from here inherit.

    Args:
        folder: made if it is not there; empty: a new temporary folder.

    Returns:
        The folder.

    Raises:
        PipelineSyntaxError: files cannot be written there.

    >>> import graphopt
    >>> folder = graphopt.enable_graph_optimization_dump()
    >>> folder.is_dir()
    True
    """
    named = folder if folder else tempfile.mkdtemp(prefix="graphopt-")
    checked = _folder(named, "folder")
    assert checked is not None
    chosen = checked.absolute()
    places.make_folder(chosen)
    os.environ["GRAPHOPT_DUMP"] = str(chosen)
    logger.info("graphs are written to %s after each pass", chosen)
    return chosen


def _given(value: Any, argument: str, variable: str) -> tuple[Any, str]:
    """Returns a setting and its source: an argument, or an environment variable that is not
    empty."""
    if value is not None:
        return value, argument
    return os.environ.get(variable) or None, variable


def _folder(value: Any, place: str) -> Path | None:
    if value is None:
        return None
    try:
        folder = places.place(value)
    except FileError:
        raise PipelineSyntaxError(f"{place}={value!r}: a folder is expected") from None
    reason = places.why_unwritable(folder)
    if reason is not None:
        raise PipelineSyntaxError(f"{place}={str(value)!r}: {reason}")
    return folder


def _disabled(value: Any, place: str, known: Callable[[], Iterable[str]]) -> frozenset[str]:
    if value is None:
        return frozenset()
    entries = value.split(",") if isinstance(value, str) else list(value)
    names = [entry.name if isinstance(entry, Pass) else str(entry).strip() for entry in entries]
    wanted = [name for name in names if name]
    there = set(known()) if wanted else set()
    for name in wanted:
        if name not in there:
            raise PipelineSyntaxError(
                f"{place} names {name!r}, which is not a pass" + suggestion(name, there)
            )
    return frozenset(wanted)


def _count(value: Any, place: str) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    is_number = isinstance(value, (int, str)) and not isinstance(value, bool)
    if is_number and re.fullmatch(r"\d{1,9}", text):
        return int(text)
    raise PipelineSyntaxError(f"{place}={value!r}: a number of passes is expected, 0 or more")
