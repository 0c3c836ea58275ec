"""What the demo shows: progress while it trains, and the table afterwards."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphopt.demo.launch import Event
from graphopt.demo.model import GPTSize
from graphopt.demo.replica import VARIANTS, Variant
from graphopt.demo.worker import BATCH

WARM_UP_STEPS = 6  # the first round
_NAMES: dict[Variant, str] = {"eager": "eager DDP", "graphopt": "graphopt"}


@dataclass
class Results:
    """Everything the ranks reported, by rank.

    Attributes:
        steps: per rank, one event for each step.
        compared: per rank, the comparison of the two replicas at the end.
        alone: per variant and rank, memory and traffic of the variant by itself.
    """

    steps: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    compared: dict[int, Event] = field(default_factory=dict)
    alone: dict[Variant, dict[int, Event]] = field(default_factory=lambda: defaultdict(dict))
    parameters: int = 0
    sample: str = ""

    def record(self, rank: int, event: Event) -> None:
        """Keep one event of the side-by-side run."""
        kind = event["kind"]
        if kind == "step":
            self.steps[rank].append(event)
        elif kind == "compared":
            self.compared[rank] = event
        elif kind == "start":
            self.parameters = event["parameters"]
        elif kind == "sample":
            self.sample = event["text"]

    def seconds(self, variant: Variant) -> list[float]:
        """Per step, the slowest rank's time."""
        per_rank = [[step["seconds"][variant] for step in steps] for steps in self.steps.values()]
        return [max(step) for step in zip(*per_rank, strict=True)]

    def loss(self, variant: Variant, step: int = -1) -> float:
        """The mean over the ranks."""
        losses = [steps[step]["loss"][variant] for steps in self.steps.values()]
        return float(sum(losses) / len(losses))

    @property
    def largest_difference(self) -> float:
        """Over all ranks."""
        return max(float(event["largest"]) for event in self.compared.values())

    @property
    def differing(self) -> list[str]:
        """Tensors whose bits differ, with their ranks."""
        return [
            f"{name} (rank {rank})"
            for rank, event in sorted(self.compared.items())
            for name in event["differing"]
        ]


class ProgressView:
    """A progress bar with both losses; a line now and then where the output is not a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._done = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("starting the ranks", total=steps, loss="")

    def __enter__(self) -> ProgressView:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Show one event of rank 0."""
        if event["kind"] == "start":
            self._say("first steps: capturing the training step as a graph")
        elif event["kind"] == "step":
            self._show_step(event["loss"])

    def _show_step(self, losses: dict[Variant, float]) -> None:
        self._done += 1
        loss = "   ".join(f"{_NAMES[variant]} {losses[variant]:.4f}" for variant in VARIANTS)
        self._progress.update(self._bar, advance=1, loss=f"loss: {loss}")
        if self._done == 1:
            self._progress.update(self._bar, description="training both")
        if not self._console.is_terminal and self._is_milestone():
            self._console.print(f"step {self._done}/{self._steps}  loss: {loss}")

    def _say(self, text: str) -> None:
        self._progress.update(self._bar, description=text)
        if not self._console.is_terminal:
            self._console.print(text)

    def _is_milestone(self) -> bool:
        return self._done in (1, self._steps) or self._done % max(1, self._steps // 6) == 0


def comparison_table(results: Results, ranks: int) -> Table:
    """The figures of both variants side by side."""
    table = Table(title=f"{results.parameters:,} parameters", title_style="bold")
    table.add_column("")
    for variant in VARIANTS:
        table.add_column(_NAMES[variant], justify="right")
    rows = _time_rows(results, ranks) + _alone_rows(results) + _loss_rows(results)
    for name, *values in rows:
        table.add_row(name, *values)
    table.add_section()
    table.add_row("largest difference", "", f"{results.largest_difference:.3g}")
    return table


def difference_text(results: Results) -> str:
    """What the largest difference means, in one sentence."""
    tensors = sum(int(event["tensors"]) for event in results.compared.values())
    compared = "parameters, buffers and optimizer state of every rank"
    if not results.differing:
        return f"Bit for bit the same: {tensors} tensors ({compared})."
    shown = ", ".join(results.differing[:3])
    return (
        f"Different: {len(results.differing)} of {tensors} tensors ({compared}), such as {shown}."
    )


def _time_rows(results: Results, ranks: int) -> list[list[str]]:
    seconds = {variant: results.seconds(variant) for variant in VARIANTS}
    warm_up = min(WARM_UP_STEPS, len(seconds["eager"]))
    first = [f"{sum(seconds[variant][:warm_up]):.2f} s" for variant in VARIANTS]
    steps = f"first {warm_up} steps" if warm_up > 1 else "first step"
    rows = [[f"{steps}, with capture", *first]]
    measured = {variant: seconds[variant][warm_up:] for variant in VARIANTS}
    if not measured["eager"]:
        return rows
    middles = {variant: median(measured[variant]) for variant in VARIANTS}
    tokens = ranks * BATCH * GPTSize.length
    ratios = [
        captured / eager
        for eager, captured in zip(measured["eager"], measured["graphopt"], strict=True)
    ]
    rows.append(["step time, median", *(f"{1e3 * middles[v]:.1f} ms" for v in VARIANTS)])
    rows.append(["  middle half", *(f"{_range(measured[v], 1e3, '.1f')} ms" for v in VARIANTS)])
    rows.append([f"  ratio, median of {len(ratios)}", "1", f"{median(ratios):.3f}"])
    rows.append(["  middle half", "", _range(ratios, 1, ".3f")])
    rows.append(["tokens/s", *(f"{tokens / middles[v]:,.0f}" for v in VARIANTS)])
    return rows


def _alone_rows(results: Results) -> list[list[str]]:
    def column(name: str) -> list[Any]:
        return [max(event[name] for event in results.alone[v].values()) for v in VARIANTS]

    return [
        ["collectives per step", *map(str, column("collectives"))],
        ["bytes reduced per step and rank", *(f"{size:,}" for size in column("payload_bytes"))],
        ["peak memory, without imports", *map(_megabytes, column("peak"))],
    ]


def _loss_rows(results: Results) -> list[list[str]]:
    return [
        ["loss, first step", *(f"{results.loss(variant, 0):.6f}" for variant in VARIANTS)],
        ["loss, last step", *(f"{results.loss(variant):.6f}" for variant in VARIANTS)],
    ]


def _range(values: list[float], unit: float, form: str) -> str:
    """From the first to the third quartile."""
    several = len(values) > 1
    low, _, high = quantiles(values, n=4, method="inclusive") if several else values * 3
    return f"{low * unit:{form}} to {high * unit:{form}}"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
