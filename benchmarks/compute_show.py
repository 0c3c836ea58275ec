"""The tables of `compute.py`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean, median

from compute_variants import EAGER, INDUCTOR, INDUCTOR_RANDOM, TORCH_COMPILE, VARIANTS
from rich.table import Table
from spread import Figures, spread


def model_tables(model: str, found: Figures) -> Iterator[Table]:
    """Of one model: the variants, then what there is to say of compiled ones."""
    yield variants_table(model, found)
    yield facts_table(model, found)


def variants_table(model: str, found: Figures) -> Table:
    """Step time and memory by variant."""
    table = Table(
        "",
        "step, ms",
        "/ eager",
        "/ best torch.compile (*)",
        "peak MiB",
        "/ eager",
        title=f"{model}: {found['sizes']} ({found['steps_per_turn']} steps a turn)",
    )
    best = best_torch_compile(found)
    for variant, seconds in found["seconds"].items():
        row = [f"{1e3 * median(seconds):.2f}"]
        row += [show(paired(found, variant, other)) for other in (EAGER, best)]
        if variant in found["memory"]:
            peak, eager = found["memory"][variant], found["memory"][EAGER]
            row += [f"{peak / 2**20:.1f}", f"{peak / eager:.3f}"]
        table.add_row(variant + (" *" if variant == best else ""), *row)
    for variant, reason in found["failed"].items():
        table.add_row(variant, f"does not work: {reason}")
    return table


def facts_table(model: str, found: Figures) -> Table:
    """Start, lowering, optimizers and numerics."""
    table = Table("", "", title=f"{model}: compiled variants", show_header=False)
    for variant, start in found["start"].items():
        table.add_row(
            f"two steps, cold / warm: {variant}", f"{start['cold']:.1f} s / {start['warm']:.1f} s"
        )
    lowered = found["lowered"]
    share = lowered["lowered"] / lowered["nodes"]
    table.add_row(
        "ATen calls lowered",
        f"{share:.1%}  ({lowered['lowered']} of {lowered['nodes']}; {lowered['free']} free ones)",
    )
    kept = ", ".join(f"{name} {count}" for name, count in lowered["kept"].items())
    table.add_row("not lowered", kept or "none")
    table.add_row("regions", f"{lowered['regions']}, fell back: {len(lowered['fell_back'])}")
    for variant in found["seconds"]:
        if variant.startswith(f"{INDUCTOR}, "):
            table.add_row(f"{variant} / {INDUCTOR}", show(paired(found, variant, INDUCTOR)))
    for variant, errors in found["numerics"].items():
        listed = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        table.add_row(f"error against float64: {variant}", listed)
    return table


def means_table(models: dict[str, Figures]) -> Table:
    """Geometric means over all models, of the variants that work on all."""
    table = Table(
        "", "/ eager", "/ best torch.compile", title=f"geometric means: {', '.join(models)}"
    )
    for variant in (*VARIANTS, INDUCTOR_RANDOM):
        if variant == INDUCTOR_RANDOM:
            models = {name: _random_if_any(found) for name, found in models.items()}
        if any(variant not in found["seconds"] for found in models.values()):
            table.add_row(variant, "does not work on all models")
            continue
        eager = [paired(found, variant, EAGER) for found in models.values()]
        best = [paired(found, variant, best_torch_compile(found)) for found in models.values()]
        means = (geometric_mean([one["median"] for one in ratios]) for ratios in (eager, best))
        table.add_row(variant, *(f"{mean:.3f}" for mean in means))
    return table


def _random_if_any(found: Figures) -> Figures:
    """Figures of a model in which one without dropout is as fast with random numbers compiled."""
    seconds = found["seconds"]
    return {**found, "seconds": {INDUCTOR_RANDOM: seconds[INDUCTOR], **seconds}}


def best_torch_compile(found: Figures) -> str:
    """The variant of torch.compile with the lowest median of this model."""
    working = [variant for variant in TORCH_COMPILE if variant in found["seconds"]]
    return min(working, key=lambda variant: median(found["seconds"][variant]))


def paired(found: Figures, variant: str, other: str) -> Figures:
    """Ratios of step time, round by round."""
    pairs = zip(found["seconds"][variant], found["seconds"][other], strict=True)
    return spread([one / two for one, two in pairs])


def show(ratio: Figures) -> str:
    """Median and quartiles."""
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.3f} ({low:.3f} to {high:.3f})"
