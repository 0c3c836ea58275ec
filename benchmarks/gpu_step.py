"""Benchmark of GPT-2 on a CUDA device: checks, then step times of eager, torch.compile and
graphopt.

    python benchmarks/gpu_step.py --json gpu.json
    python benchmarks/gpu_step.py --quick

The meaning of each figure: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_step_checks import Check, check_numerics, check_programs
from gpu_step_variants import COMPILED, EAGER, VARIANTS, Task, Training, seconds_of, synchronize
from rich.console import Console
from rich.table import Table
from spread import Figures, spread
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphopt.estimate.memory import peak_memory

WARM_UP = 4
"""Steps before measuring: capture of the first and of the steady step, warm-up and recording."""
TURN = 5
"""Steps of one variant before another's turn."""
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations per second, as NVIDIA states them, by part of the device's name."""


def check(options: argparse.Namespace, device: str) -> Iterator[Check]:
    """Runs all correctness checks."""
    yield from check_numerics(device)
    if not options.rehearse:
        yield from check_programs(options.quick)


def prepare(
    variant: str, task: Task, generator: torch.Generator, caches: str
) -> tuple[Training, Figures]:
    """Builds a variant and runs it until it is steady; returns its seconds and bytes.

    Compiled code lies in a folder of its own; variants that differ only in CUDA graphs share one.
    """
    folder = variant.removesuffix("+cudagraphs").replace(" ", "-")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.path.join(caches, folder, name)
    batches = [task.tokens(generator) for _ in range(WARM_UP)]
    made: list[Training] = []
    start = time.perf_counter()

    def first_steps() -> None:
        made.append(Training(variant, task))
        made[0].run(batches)

    peak = peak_memory(first_steps, torch.device(task.device))
    synchronize(task.device)
    return made[0], {"peak_bytes": peak, "first_steps_seconds": time.perf_counter() - start}


def measure(
    options: argparse.Namespace, task: Task, console: Console
) -> tuple[Figures, dict[str, list[float]]]:
    """Measures all variants; returns their figures and step seconds, round by round."""
    generator = torch.Generator().manual_seed(0)
    figures: Figures = {}
    trainings: dict[str, Training] = {}
    with tempfile.TemporaryDirectory(prefix="graphopt-") as caches:
        for variant in options.variants:
            with console.status(f"{variant}: first steps"):
                try:
                    trainings[variant], figures[variant] = prepare(variant, task, generator, caches)
                except Exception as error:
                    reason = (str(error).strip().splitlines() or ["no message"])[0]
                    figures[variant] = {"error": f"{type(error).__name__}: {reason}"}
                    gc.collect()
        seconds: dict[str, list[float]] = {variant: [] for variant in trainings}
        order = list(trainings)
        for _ in range(options.rounds):
            batches = [task.tokens(generator) for _ in range(TURN)]
            for variant in order:
                turn = partial(trainings[variant].run, batches)
                seconds[variant].append(seconds_of(task.device, turn) / TURN)
            order = order[1:] + order[:1]
        for variant, training in trainings.items():
            figures[variant]["kernels"] = kernels_per_step(training, task.tokens(generator))
    return figures, seconds


def kernels_per_step(training: Training, tokens: Tensor) -> int | None:
    """The number of kernels that the device runs in one step."""
    if training.task.device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        training.run([tokens])
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in found.events()
    )


def flops_per_step(task: Task) -> float:
    """The floating-point operations of a step, after Chowdhery et al., PaLM (2022), appendix B:
    for each token 6 for each weight, without positions, which are only looked up, and 12 *
    layers * width * length for attention."""
    model: Any = task.model()
    config, tokens = model.config, task.batch * task.length
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= model.transformer.wpe.weight.numel()
    attention = 12 * config.n_layer * config.n_embd * task.length
    return float((6 * weights + attention) * tokens)


def add_times(figures: Figures, seconds: dict[str, list[float]], flops: float, peak: float) -> None:
    """Adds ratios to eager and to the fastest `torch.compile` of each round, and MFU."""
    compiled = [variant for variant in COMPILED if variant in seconds]
    best = min(compiled, key=lambda variant: median(seconds[variant]), default=None)
    for variant, taken in seconds.items():
        figures[variant] |= {
            "seconds": taken,
            "milliseconds": spread([1e3 * s for s in taken]),
            "mfu": flops / median(taken) / peak if peak else None,
        }
        for name, other in (("over_eager", EAGER), ("over_best_compile", best)):
            pairs = zip(taken, seconds.get(other or "", []), strict=False)
            ratios = [mine / theirs for mine, theirs in pairs]
            figures[variant][name] = spread(ratios) if ratios else None


def show(figures: Figures, title: str) -> Table:
    """Prints a table with one row per variant."""
    times = ("milliseconds", "over_eager", "over_best_compile")
    heads = ("", "ms per step", "/ eager", "/ best compile", "kernels", "MFU", "first steps")
    table = Table(*heads, "peak GiB", title=title)
    for variant, found in figures.items():
        if "seconds" not in found:
            table.add_row(variant, f"[red]{found.get('error')}[/]")
            continue
        table.add_row(
            variant,
            *(shown_spread(found[name]) for name in times),
            "" if found["kernels"] is None else str(found["kernels"]),
            "" if found["mfu"] is None else f"{found['mfu']:.1%}",
            f"{found['first_steps_seconds']:.1f} s",
            f"{found['peak_bytes'] / 2**30:.2f}",
        )
    return table


def shown_spread(found: Figures | None) -> str:
    """The median and quartiles as text; empty if not measured."""
    if found is None:
        return ""
    low, high = found["quartiles"]
    return f"{found['median']:.3f} [{low:.3f} {high:.3f}]"


def parse() -> argparse.Namespace:
    """Parses the command line options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, checks and variants")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", choices=("autocast", "weights"), default="autocast")
    parser.add_argument("--steps-only", action="store_true", help="no checks")
    parser.add_argument("--rounds", type=int, help="turns of each variant; 20, with --quick 5")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all")
    parser.add_argument("--peak-tflops", type=float, help=f"for MFU; known: {', '.join(PEAKS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as well")
    parser.add_argument(
        "--rehearse", action="store_true", help="run this script on the CPU; figures mean nothing"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick or options.rehearse else 20)
    short = [variant for variant in VARIANTS if variant != "compile max-autotune"]
    options.variants = options.variants or (short if options.quick else list(VARIANTS))
    return options


def main() -> int:
    """Checks, measures and prints. Exit status: 0, 1 if a check failed, 2 without a device."""
    options, console = parse(), Console(width=max(150, Console().width))
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device; --rehearse runs this script on the CPU", file=sys.stderr)
        return 2
    device = "cpu" if options.rehearse else "cuda"
    size = (2, 32) if options.rehearse else (options.batch, options.length)
    task = Task(device, *size, options.dropout, options.bf16, tiny=options.rehearse)
    checks = []
    for each in () if options.steps_only else check(options, device):
        checks.append(each)
        console.print(each.name, "ok" if each.passed else "[red]FAILED[/]", each.found)
    figures, seconds = measure(options, task, console)
    name = "CPU" if options.rehearse else torch.cuda.get_device_name()
    known = next((peak for part, peak in PEAKS.items() if part in name), 0.0)
    peak = 1e12 * options.peak_tflops if options.peak_tflops else known
    flops = flops_per_step(task)
    add_times(figures, seconds, flops, peak)
    title = f"GPT-2, {options.bf16}, {size[0]} x {size[1]}, {name}, torch {torch.__version__}"
    console.print(show(figures, title))
    console.print(f"MFU: {flops:.4g} operations per step / seconds / {peak or 'unknown peak'}")
    if options.json:
        found = {"device": name, "torch": torch.__version__, "steps": figures}
        found |= {"checks": [each._asdict() for each in checks], "flops_per_step": flops}
        options.json.write_text(json.dumps(found, indent=2))
    return 0 if all(each.passed for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
