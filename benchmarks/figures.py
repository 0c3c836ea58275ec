"""Shared code of all benchmarks: options, medians with quartiles, tables and files of figures."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks, described by `doc`."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    return made


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs `work`; returns the process's CPU seconds and the result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def spread(values: list[float]) -> Figures:
    """The median and the quartiles of values."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "quartiles": [low, high]}


def spread_text(found: Figures) -> str:
    """The median and quartiles as text."""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f}-{high:.3f}]"


def table(rows: Sequence[Figures], **options: Any) -> Table:
    """A table with a row for each of `rows`, whose keys are the columns; numbers with a fraction
    are shown with two digits of it."""
    made = Table(**options)
    for number, column in enumerate(rows[0]):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
    return made


def tabulate(
    options: argparse.Namespace, found: Iterable[Any], shown: Callable[[Any], Table]
) -> None:
    """Prints a table for each of `found`, and writes all of it where `--json` says."""
    rows = []
    for row in found:
        Console(width=max(150, Console().width)).print(shown(row))
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))
