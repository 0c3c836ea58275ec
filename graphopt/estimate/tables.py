"""Tables of predictions and measurements, each with one sentence of advice."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from rich.table import Table

from graphopt.estimate.measure import COMPUTE, EAGER, MeasuredVariants, Variant
from graphopt.estimate.predict import Prediction

_WORTH = 0.97
"""A step that takes more than this share of the best other one gains too little to say so."""
_HIDDEN = 0.05
"""Where communication takes a smaller share of compute, there is nothing to hide."""


def prediction_table(predictions: Sequence[Prediction], network: str) -> Table:
    """A table with one row per number of ranks; DDP by bucket size in MB, memory over the best
    DDP's."""
    table = _table(f"Predicted step in ms, network: {network}")
    ddp = [f"DDP {size:g}" for size in predictions[0].ddp]
    for heading in ("ranks", "compute", "comm", "bound", *ddp, "ours", "/ best", "mem"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in predictions:
        seconds = (found.compute, found.communication, found.bound, *found.ddp.values(), found.ours)
        ratio = found.ours / found.ddp[found.best_bucket]
        memory = f"{found.peak_bytes[1] / max(1, found.peak_bytes[0]):.2f}"
        table.add_row(str(found.ranks), *map(milliseconds, seconds), f"{ratio:.2f}", memory)
    return table


def prediction_advice(predictions: Sequence[Prediction]) -> str:
    """A sentence that says if graphopt is worth it for this step."""
    small = [p for p in predictions if p.communication < _HIDDEN * p.compute]
    best = min(predictions, key=lambda p: p.ours / p.ddp[p.best_bucket])
    ratio = best.ours / best.ddp[best.best_bucket]
    if len(small) == len(predictions):
        return (
            "Not worth it for speed: communication takes less than 5 % of the compute, so that"
            " DistributedDataParallel hides it as well."
        )
    if ratio > _WORTH:
        return (
            f"Little to gain: at best {ratio:.2f} of DistributedDataParallel with buckets of"
            f" {best.best_bucket:g} MB, on {best.ranks} ranks; setting its bucket size gives the"
            " rest."
        )
    return (
        f"On {best.ranks} ranks a step takes {ratio:.2f} of DistributedDataParallel's with its best"
        f" buckets ({best.best_bucket:g} MB), and {best.ours / best.bound:.2f} of the bound."
        " --measure runs it."
    )


def measurement_table(found: MeasuredVariants) -> Table:
    """A table with one row per variant."""
    turns = len(found.variants[found.baseline].seconds)
    title = f"Measured step on {_where(found)}, {turns} turns"
    table = _table(title, gap=1)
    table.add_column("", no_wrap=True)
    other = "eager" if found.baseline == EAGER else "DDP"
    for heading in (f"/ {other}", "ms", "exposed", "1st call", "MiB", "differs"):
        table.add_column(heading, justify="right", no_wrap=True)
    base, compute = found.variants[found.baseline], found.variants.get(COMPUTE)
    for name, variant in found.variants.items():
        exposed = median(variant.seconds) - median(compute.seconds) if compute else None
        table.add_row(
            name,
            median_and_quartiles(_ratios(variant, base)),
            milliseconds(median(variant.seconds)),
            "" if exposed is None or variant is compute else milliseconds(max(0.0, exposed)),
            f"{variant.first_call:.1f} s",
            f"{variant.peak_bytes / 2**20:,.0f}",
            "" if name in (COMPUTE, found.baseline) else f"{found.differences[name]:.2g}",
        )
    return table


def measurement_advice(found: MeasuredVariants) -> str:
    """A sentence that names the variant to use."""
    ours = {name: v for name, v in found.variants.items() if name.startswith("graphopt")}
    others = {n: v for n, v in found.variants.items() if n not in ours and n != COMPUTE}
    fastest = min(ours, key=lambda name: median(ours[name].seconds))
    other = min(others, key=lambda name: median(others[name].seconds))
    ratio = median(_ratios(ours[fastest], others[other]))
    if ratio > _WORTH:
        return f"Not worth it for speed here: {fastest} takes {ratio:.2f} of {other}."
    exact = "the same bits" if not found.differences[fastest] else "other last bits"
    return f"Use {fastest}: {ratio:.2f} of {other}, the best of the others, with {exact}."


def _table(title: str, gap: int = 2) -> Table:
    return Table(
        title=title, title_style="bold", title_justify="left", box=None, padding=(0, gap, 0, 0)
    )


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds, such as ``12.3`` or ``1234``."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.9995 else f"{1e3 * seconds:.0f}"


def median_and_quartiles(values: Sequence[float]) -> str:
    """The median and the quartiles of values, as text."""
    middle = f"{median(values):.2f}"
    if len(values) < 2:
        return middle
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{middle} ({low:.2f}-{high:.2f})"


def _ratios(one: Variant, other: Variant) -> list[float]:
    return [a / b for a, b in zip(one.seconds, other.seconds, strict=True)]


def _where(found: MeasuredVariants) -> str:
    if found.device.type == "cuda":
        return f"{found.ranks} GPU{'s' * (found.ranks > 1)}"
    return "the CPU" if found.ranks == 1 else f"{found.ranks} processes on the CPU"
