"""Implementation of `graphopt lower`, which compiles a saved graph to Triton kernels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphopt._compat import triton_binaries
from graphopt.commands.errors import FAILED, reported
from graphopt.errors import LoweringError
from graphopt.ir.user_files import make_folder, place, write
from graphopt.lowering.triton_kernels import (
    TritonKernel,
    TritonReport,
    lower_to_triton,
    parse_target,
)
from graphopt.saved import load_graph

_FIGURES = ("registers", "shared_bytes", "spills", "num_warps", "regions")


def run_lower(file: Path, target: str, out: Path, min_ops: int) -> None:
    """Writes the kernels of the graph in `file` to the folder `out`, and prints a table of them."""
    console = Console()
    with reported("lower"):
        out = place(out)
        graph_module = load_graph(file)
        parse_target(target)
        make_folder(out)
        with Console(stderr=True).status("reading regions") as status:
            report = lower_to_triton(graph_module, target, min_ops=min_ops, progress=status.update)
        if report.regions == 0:
            raise LoweringError(
                f"{file} has no region of {min_ops} operators that can be compiled\n"
                "  hint:  --min-ops takes smaller ones as well"
            )
        _write(report, out)
    console.print(_table(report.kernels))
    console.out(f"{_summary(report)}\nsaved: {out}", highlight=False)
    if report.failures:
        with reported("lower", FAILED):
            raise LoweringError("\n".join(map(str, report.failures)))


def _write(report: TritonReport, out: Path) -> None:
    for kernel in report.kernels:
        write(out / f"{kernel.name}.py", kernel.source)
        write(out / f"{kernel.name}.ptx", kernel.ptx)
        write(out / f"{kernel.name}.cubin", kernel.cubin)
    write(out / "kernels.json", json.dumps(_described(report), indent=2) + "\n")


def _described(report: TritonReport) -> dict[str, Any]:
    return {
        "target": report.target,
        "torch": torch.__version__,
        "triton": triton_binaries.version(),
        "regions": report.regions,
        "kernels": [
            {
                "name": kernel.name,
                **{figure: getattr(kernel, figure) for figure in _FIGURES},
                "cubin_bytes": len(kernel.cubin),
            }
            for kernel in report.kernels
        ],
        "externs": dict(sorted(report.externs.items())),
        "failures": [str(failure) for failure in report.failures],
    }


def _table(kernels: list[TritonKernel]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("kernel", "total", overflow="fold")
    table.add_column("registers", justify="right", no_wrap=True)
    for heading, total in (
        ("shared", sum(kernel.shared_bytes for kernel in kernels)),
        ("spills", sum(kernel.spills for kernel in kernels)),
        ("cubin", sum(len(kernel.cubin) for kernel in kernels)),
    ):
        table.add_column(heading, str(total), justify="right", no_wrap=True)
    for kernel in kernels:
        table.add_row(
            escape(kernel.name),
            str(kernel.registers),
            str(kernel.shared_bytes),
            str(kernel.spills),
            str(len(kernel.cubin)),
        )
    return table


def _summary(report: TritonReport) -> str:
    lines = [f"{report.target}: {len(report.kernels)} kernels of {report.regions} regions"]
    if report.externs:
        lines.append(f"calls of libraries: {_counted(report.externs)}")
    return "\n".join(lines)


def _counted(externs: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in externs.most_common())
