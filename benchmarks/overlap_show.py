"""Tables and plots of what `overlap.py` measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.table import Table
from spread import Figures

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
UNRELATED = "both, unrelated"


def table(row: Figures) -> Table:
    """One model on one link."""
    rate = row["bits_per_second"]
    link = "no shaped link" if rate is None else f"{rate / 1e6:.0f} Mbit/s"
    batch = f"{row['batch']} times the batch, " if row["batch"] > 1 else ""
    made = Table(
        title=f"{row['model']}, {row['form']}, {batch}communication / compute set to"
        f" {row['ratio']:g} ({link}); preemptive bound {1e3 * row['preemptive_bound']:.1f} ms,"
        f" with compute in its order {1e3 * row['in_order_bound']:.1f} ms"
    )
    for heading in ("variant", "ms", "/ bound", "/ best DDP", "CPU, ms", "others", "pages", "|Δ|"):
        made.add_column(heading)
    for name, times in row["seconds"].items():
        difference = row["differences"].get(name)
        made.add_row(
            name + (" (best)" if name == row["best_ddp"] else ""),
            f"{1e3 * median(times):.1f}",
            shown(row["per_bound"][name]),
            shown(row["per_best"][name]),
            f"{row['usage'][name]['cpu_ms']:.1f}",
            f"{row['usage'][name]['others_ms']:.1f}",
            f"{row['usage'][name]['fresh_pages']:.0f}",
            "" if difference is None else f"{difference:g}",
        )
    return made


def shown(found: Figures) -> str:
    """Median and quartiles."""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f}-{high:.3f}]"


def plot(rows: Sequence[Figures], path: Path) -> None:
    """Step time against the bound, one line for each variant, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys((row["model"], row["form"]) for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        mine = [row for row in rows if (row["model"], row["form"]) == model]
        for name in mine[0]["per_bound"]:
            if name not in (COMPUTE, COMMUNICATION, UNRELATED):
                heights = [row["per_bound"][name]["median"] for row in mine]
                panel.plot([row["ratio"] for row in mine], heights, marker="o", label=name)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set(
            title=", ".join(model),
            xlabel="communication / compute",
            ylabel="step / bound",
            xscale="log",
        )
    panels[0][-1].legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")
