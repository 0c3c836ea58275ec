"""GPT-2 on a CUDA device: checks, then step times of eager, torch.compile and graphopt.

    python benchmarks/gpu_step.py --json gpu.json
    python benchmarks/gpu_step.py --quick

What the figures mean and how they are taken: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from gpu_step_checks import check_numerics, check_tests
from gpu_step_measure import (
    PEAKS,
    best_compiled,
    copy_bandwidth,
    flops_per_step,
    in_fresh_process,
    job,
    kernels_per_step,
    paired,
    peak_flops,
    prepare,
    ratios,
    use_caches,
)
from gpu_step_variants import EAGER, VARIANTS, Task, Training
from rich.console import Console
from rich.table import Table
from spread import Figures, spread


class Budget:
    """The time that the whole run may take."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._seconds = 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share_left(self) -> float:
        """What is left, as a share of all."""
        return self.left / self._seconds


def check(options: argparse.Namespace, device: str, budget: Budget, console: Console) -> Figures:
    """Everything that has to hold; as a table and as figures."""
    table = Table("check", "", "", title="checks")
    results: Figures = {}
    with console.status("checks"):
        checks = list(check_numerics(device))
        if not options.rehearse:
            checks.append(check_tests(options.quick, budget.left / 3))
    for each in checks:
        table.add_row(each.name, "ok" if each.passed else "[red]FAILED[/]", each.found)
        results[each.name] = {"passed": each.passed, "found": each.found}
    console.print(table)
    return results


def measure(
    options: argparse.Namespace, task: Task, budget: Budget, console: Console
) -> tuple[Figures, dict[str, list[float]]]:
    """All figures of all variants, and the seconds of their steps."""
    generator = torch.Generator().manual_seed(0)
    figures: Figures = {}
    trainings: dict[str, Training] = {}
    # The slowest to compile comes last, and is left out if that leaves no time to measure.
    for variant in sorted(options.variants, key="compile max-autotune".__eq__):
        if variant == "compile max-autotune" and budget.share_left() < 0.45:
            figures[variant] = {"error": "there was no time left to compile it"}
            continue
        with console.status(f"{variant}: first steps"):
            try:
                trainings[variant], figures[variant] = prepare(variant, task, generator)
            except Exception as error:
                reason = (str(error).strip().splitlines() or ["no message"])[0]
                figures[variant] = {"error": f"{type(error).__name__}: {reason}"}
                gc.collect()
        console.print(f"{variant}: {first_steps(figures[variant])}")
    with console.status("step times in turns"):
        seconds = paired(trainings, task, options.rounds, generator, lambda: budget.left <= 0)
    with console.status("kernels"):
        for variant, training in trainings.items():
            if not options.steps_only and budget.left > 0:
                figures[variant]["kernels"] = kernels_per_step(training, task.tokens(generator))
    trainings.clear()
    gc.collect()
    for variant in seconds:
        plain = variant == EAGER or "none" in variant or "default" in variant
        if plain or options.steps_only:
            continue
        with console.status(f"{variant}: warm start"):
            warm = in_fresh_process("warm", task, budget.left, variant=variant)
        figures[variant]["warm_start_seconds"] = warm.get("first_steps_seconds")
        figures[variant]["warm_start_error"] = warm.get("error")
    return figures, seconds


def first_steps(found: Figures) -> str:
    """How the first steps of a variant went."""
    error = found.get("error")
    return f"[red]{error}[/]" if error else f"first steps {found['first_steps_seconds']:.1f} s"


def add_times(figures: Figures, seconds: dict[str, list[float]], flops: float, peak: float) -> None:
    """What follows from the step times."""
    best = best_compiled(seconds)
    for variant, taken in seconds.items():
        figures[variant] |= {
            "seconds": taken,
            "milliseconds": spread([1e3 * s for s in taken]),
            "over_eager": ratios(seconds, EAGER)[variant] if EAGER in seconds else None,
            "over_best_compile": None if best is None else ratios(seconds, best)[variant],
            "mfu": flops / median(taken) / peak if peak else None,
        }


def show(figures: Figures, title: str) -> Table:
    """One row for each variant."""
    columns: tuple[str, ...] = (
        "",
        "ms per step",
        "/ eager",
        "/ best compile",
        "kernels",
        "MFU",
        "first steps",
    )
    table = Table(*columns, "warm", "peak GiB", title=title)
    for variant, found in figures.items():
        if "seconds" not in found:
            table.add_row(variant, f"[red]{found.get('error')}[/]")
            continue
        table.add_row(
            variant,
            *(
                shown_spread(found[name])
                for name in ("milliseconds", "over_eager", "over_best_compile")
            ),
            *(shown(found.get("kernels"), "d"), shown(found["mfu"], ".1%")),
            *(shown(found.get(f"{n}_seconds"), ".1f", " s") for n in ("first_steps", "warm_start")),
            shown(found["peak_bytes"] and found["peak_bytes"] / 2**30, ".2f"),
        )
    return table


def shown_spread(found: Figures | None) -> str:
    """Median and quartiles; nothing for what was not measured."""
    if found is None:
        return ""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f} {high:.3f}]"


def shown(value: float | None, form: str, unit: str = "") -> str:
    """Nothing for what was not measured."""
    return "" if value is None else f"{value:{form}}{unit}"


def bandwidth(task: Task, budget: Budget, console: Console) -> Figures:
    """Of the device, and the share of it that compiled kernels reach."""
    found: Figures = {"copy_bytes_per_second": copy_bandwidth(task.device)}
    console.print(f"copy: {found['copy_bytes_per_second'] / 1e9:.0f} GB/s")
    with console.status("kernels one by one"):
        kernels = in_fresh_process("bandwidth", task, budget.left)
    if "error" in kernels:
        console.print(f"[red]kernels one by one: {kernels['error']}[/]")
        return found | {"error": kernels["error"]}
    for kind, each in kernels.items():
        if each["seconds"]:
            each["share"] = each["bytes"] / each["seconds"] / found["copy_bytes_per_second"]
            console.print(f"Triton {kind}: {each['kernels']} kernels, {each['share']:.1%} of that")
    return found | kernels


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without max-autotune")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", choices=("autocast", "weights"), default="autocast")
    parser.add_argument(
        "--steps-only", action="store_true", help="no checks, kernels, warm starts, bandwidth"
    )
    parser.add_argument("--rounds", type=int, help="turns of each variant; 20, with --quick 5")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all")
    parser.add_argument("--minutes", type=float, help="of the whole run; 9, with --quick 3")
    parser.add_argument("--peak-tflops", type=float, help=f"for MFU; known: {', '.join(PEAKS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    parser.add_argument(
        "--rehearse", action="store_true", help="run this script on the CPU; figures mean nothing"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick or options.rehearse else 20)
    options.minutes = options.minutes or (3 if options.quick else 9)
    short = [variant for variant in VARIANTS if variant != "compile max-autotune"]
    options.variants = options.variants or (short if options.quick else list(VARIANTS))
    return options


def main() -> int:
    """Check, measure and print. Exit status: 0, 1 where a check failed, 2 without a device."""
    options = parse()
    if options.job:
        print(json.dumps(job(json.loads(options.job))))
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device; --rehearse runs this script on the CPU", file=sys.stderr)
        return 2
    device = "cpu" if options.rehearse else "cuda"
    size = (2, 32) if options.rehearse else (options.batch, options.length)
    task = Task(device, *size, options.dropout, options.bf16, tiny=options.rehearse)
    name = "CPU" if options.rehearse else torch.cuda.get_device_name()
    console, budget = Console(width=max(150, Console().width)), Budget(options.minutes)
    with tempfile.TemporaryDirectory(prefix="graphopt-") as caches:
        os.environ["GPU_STEP_CACHES"] = caches  # empty, so that first steps compile
        use_caches("checks")
        checks = {} if options.steps_only else check(options, device, budget, console)
        figures, seconds = measure(options, task, budget, console)
        rates = {} if options.steps_only else bandwidth(task, budget, console)
    peak = 1e12 * options.peak_tflops if options.peak_tflops else peak_flops(name) or 0.0
    flops = flops_per_step(task)
    add_times(figures, seconds, flops, peak)
    title = (
        f"GPT-2, {options.bf16}, {size[0]} x {size[1]} tokens, {name}, torch {torch.__version__}"
    )
    console.print(show(figures, title))
    console.print(f"MFU: {flops:.4g} operations per step / seconds / {peak or 'unknown peak'}")
    if options.json:
        every = {"device": name, "torch": torch.__version__, "checks": checks, "steps": figures}
        every |= {"bandwidth": rates, "flops_per_step": flops, "peak_flops": peak}
        options.json.write_text(json.dumps(every, indent=2))
    return 0 if all(each["passed"] for each in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
