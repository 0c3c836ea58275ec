"""Output of the demo: a progress bar during training, and tables afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from graphopt.demo.launch import Event
from graphopt.demo.replica import BUCKETS_MB, COMPUTE, DEFAULT_DDP, GRAPHOPT


@dataclass
class Results:
    """The events that all ranks reported, by rank.

    Attributes:
        turns: per rank, one event for each turn of all variants.
        compared: per rank, the comparison of DDP's model with graphopt's at the end.
        alone: per variant and rank, first call and memory of the variant by itself.
    """

    turns: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    compared: dict[int, Event] = field(default_factory=dict)
    alone: dict[str, dict[int, Event]] = field(default_factory=lambda: defaultdict(dict))
    parameters: int = 0

    def record(self, rank: int, event: Event) -> None:
        """Stores one event that a rank reported during the timed run."""
        kind = event["kind"]
        if kind == "turn":
            self.turns[rank].append(event)
        elif kind == "compared":
            self.compared[rank] = event
        elif kind == "start":
            self.parameters = event["parameters"]

    @property
    def links(self) -> list[float]:
        """The emulated links in the order of measurement."""
        return list(dict.fromkeys(turn["link"] for turn in self.turns[0]))

    def seconds(self, variant: str, link: float) -> list[float]:
        """The seconds of a step in each turn, of the slowest rank."""
        per_rank = [
            [turn["seconds"][variant] for turn in turns if turn["link"] == link]
            for turns in self.turns.values()
        ]
        return [max(turn) for turn in zip(*per_rank, strict=True)]

    def best_ddp(self, link: float) -> str:
        """The bucket size with which DDP was fastest on a link."""
        return min(BUCKETS_MB, key=lambda name: median(self.seconds(name, link)))

    def ratios(self, other: str, link: float) -> list[float]:
        """The ratio of graphopt's step to another variant's, in each turn."""
        pairs = zip(self.seconds(GRAPHOPT, link), self.seconds(other, link), strict=True)
        return [mine / its for mine, its in pairs]

    def loss(self, variant: str) -> float:
        """The final loss of a variant, averaged over ranks."""
        losses = [turns[-1]["losses"][variant] for turns in self.turns.values()]
        return float(sum(losses) / len(losses))

    @property
    def largest_difference(self) -> float:
        """The largest difference of any parameter on any rank."""
        return max(float(event["largest"]) for event in self.compared.values())

    @property
    def differing(self) -> list[str]:
        """The names of tensors whose bits differ, with their ranks."""
        return [
            f"{name} (rank {rank})"
            for rank, event in sorted(self.compared.items())
            for name in event["differing"]
        ]


class ProgressView:
    """A progress bar over all turns; plain lines if the output is not a terminal."""

    def __init__(self, console: Console, turns: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("starting the ranks", total=turns)
        self._link: float | None = None

    def __enter__(self) -> ProgressView:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Updates the progress bar by one event of rank 0."""
        if event["kind"] == "start":
            self._say("first steps: capturing the training step as a graph")
        elif event["kind"] == "turn":
            if event["link"] != self._link:
                self._link = event["link"]
                self._say(f"training in turns: {link_text(event['link'])}")
            self._progress.advance(self._bar)

    def _say(self, text: str) -> None:
        self._progress.update(self._bar, description=text)
        if not self._console.is_terminal:
            self._console.print(text)


def link_text(link: float) -> str:
    """The name of a link for tables."""
    return "loopback" if not link else f"link {link:g} x compute"


def step_table(results: Results, ranks: int) -> Table:
    """A table of milliseconds per step on each link, with graphopt's ratios; 80 columns."""
    title = f"One step, median of {len(results.seconds(GRAPHOPT, results.links[0]))} turns"
    table = Table(title=title, title_style="bold", box=None, padding=(0, 1, 0, 0))
    headings = ("ms", "compute", "DDP", "best DDP", "graphopt", "/ best DDP", "/ DDP")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for link in results.links:
        best = results.best_ddp(link)
        shown = (COMPUTE, DEFAULT_DDP, best, GRAPHOPT)
        times = [f"{1e3 * median(results.seconds(name, link)):.0f}" for name in shown]
        times[2] += f" ({best.removeprefix('DDP, ')})"
        to_best = _spread(results.ratios(best, link))
        to_default = f"{median(results.ratios(DEFAULT_DDP, link)):.2f}"
        named = link_text(link) if ranks > 1 else "one rank"
        table.add_row(named, *times, to_best, to_default)
    return table


def cost_table(results: Results) -> Table:
    """A table of each variant's first call, memory, and the loss that was compared."""
    table = Table(title="By itself", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in results.alone:
        table.add_column(name, justify="right")
    for row in _cost_rows(results):
        table.add_row(*row)
    return table


def _cost_rows(results: Results) -> Iterator[list[str]]:
    def column(field: str, unit: float, form: str) -> list[str]:
        events = [list(by_rank.values()) for by_rank in results.alone.values()]
        return [form.format(max(event[field] for event in found) / unit) for found in events]

    yield ["first step, with capture", *column("first_call", 1, "{:.2f} s")]
    yield ["peak memory of the training", *column("peak", 2**20, "{:,.0f} MiB")]
    yield ["loss after the last step", *(f"{results.loss(v):.6f}" for v in results.alone)]
    yield ["largest difference", "", f"{results.largest_difference:.3g}"]


def difference_text(results: Results) -> str:
    """A sentence about the largest difference between the variants' parameters."""
    tensors = sum(int(event["tensors"]) for event in results.compared.values())
    compared = "parameters, buffers and optimizer state of every rank"
    if not results.differing:
        return f"Bit for bit the same: {tensors} tensors ({compared})."
    shown = ", ".join(results.differing[:3])
    return (
        f"Different: {len(results.differing)} of {tensors} tensors ({compared}), such as {shown}."
    )


def _spread(values: list[float]) -> str:
    """The median and the quartiles of values, as text."""
    middle = f"{median(values):.2f}"
    if len(values) < 2:
        return middle
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{middle} ({low:.2f}-{high:.2f})"
