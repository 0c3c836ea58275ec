"""The tables that the demo prints."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from graphopt.demo.training import GRAPHOPT, DemoResults, link_text
from graphopt.estimate.measure import COMPUTE, EAGER
from graphopt.estimate.tables import median_and_quartiles


def baseline_of(results: DemoResults) -> str:
    """The variant that the others are compared with: eager, or DDP with its default buckets."""
    return next(name for name in results.first_call if name == EAGER or name.startswith("DDP"))


def step_table(results: DemoResults) -> Table:
    """A table of milliseconds per step on each link, with graphopt's ratios; 80 columns."""
    baseline = baseline_of(results)
    alone = baseline == EAGER
    turns = len(next(iter(results.seconds.values()))[GRAPHOPT])
    title = f"One step, median of {turns} turns"
    table = Table(title=title, title_style="bold", box=None, padding=(0, 1, 0, 0))
    several = ("compute", "DDP", "best DDP", "graphopt", "/ best DDP", "/ DDP")
    for heading in ("ms", *((EAGER, GRAPHOPT, "/ eager") if alone else several)):
        table.add_column(heading, justify="left" if heading == "ms" else "right", no_wrap=True)
    for link, seconds in results.seconds.items():
        if alone:
            times = [_milliseconds(seconds[name]) for name in (EAGER, GRAPHOPT)]
            table.add_row("one rank", *times, median_and_quartiles(_ratios(seconds, EAGER)))
            continue
        best = best_ddp(seconds)
        times = [_milliseconds(seconds[name]) for name in (COMPUTE, baseline, best, GRAPHOPT)]
        times[2] += f" ({best.removeprefix('DDP, ')})"
        to_default = f"{median(_ratios(seconds, baseline)):.2f}"
        to_best = median_and_quartiles(_ratios(seconds, best))
        table.add_row(link_text(link), *times, to_best, to_default)
    return table


def best_ddp(seconds: dict[str, list[float]]) -> str:
    """The bucket size with which DDP was fastest."""
    ddp = [name for name in seconds if name.startswith("DDP")]
    return min(ddp, key=lambda name: median(seconds[name]))


def cost_table(results: DemoResults) -> Table:
    """A table of first calls, memory, and the losses of the trainings that were compared."""
    table = Table(title="Besides", title_style="bold", box=None, padding=(0, 2, 0, 0))
    names = (baseline_of(results), GRAPHOPT)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for row in _cost_rows(results, names):
        table.add_row(*row)
    return table


def _cost_rows(results: DemoResults, names: tuple[str, str]) -> Iterator[list[str]]:
    yield ["first step, with capture", *(f"{results.first_call[n]:.2f} s" for n in names)]
    yield ["memory of a step", *(f"{results.peak_bytes[n] / 2**20:,.0f} MiB" for n in names)]
    yield ["loss after the last step", *(f"{results.losses[n]:.6f}" for n in names)]
    yield ["largest difference", "", f"{results.differences[GRAPHOPT]:.3g}"]


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.0f}"


def _ratios(seconds: dict[str, list[float]], other: str) -> list[float]:
    """The ratio of graphopt's step to another variant's, in each turn."""
    return [mine / its for mine, its in zip(seconds[GRAPHOPT], seconds[other], strict=True)]
