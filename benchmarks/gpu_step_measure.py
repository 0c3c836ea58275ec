"""What `gpu_step.py` measures: step times in turns, kernels, bandwidth, compile time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_step_variants import COMPILED, Task, Training, peak_memory, seconds_of, wall_clock
from spread import Figures, spread
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP = 4
"""Steps before measuring: capture of the first and of the steady step, warm-up and recording."""
TURN = 5
"""Steps of one variant before another's turn."""

PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations per second, as NVIDIA states them, by part of the device's name."""


def use_caches(variant: str) -> None:
    """Let compiled code of a variant lie in a folder of its own; variants that differ only in CUDA
    graphs share one."""
    folder = variant.removesuffix("+cudagraphs").replace(" ", "-")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.path.join(os.environ["GPU_STEP_CACHES"], folder, name)


def prepare(variant: str, task: Task, generator: torch.Generator) -> tuple[Training, Figures]:
    """Build a variant and run it until it is steady; with the seconds and bytes this takes."""
    use_caches(variant)
    figures: Figures = {}
    batches = [task.tokens(generator) for _ in range(WARM_UP)]
    with peak_memory(task.device, figures, "peak_bytes"):
        training = Training(variant, task)
        with wall_clock(task.device, figures, "first_steps_seconds"):
            training.run(batches)
    return training, figures


def paired(
    trainings: dict[str, Training],
    task: Task,
    rounds: int,
    generator: torch.Generator,
    is_over: Callable[[], bool],
) -> dict[str, list[float]]:
    """Seconds of a step of each variant, round by round, at least one. Who begins changes."""
    seconds: dict[str, list[float]] = {variant: [] for variant in trainings}
    order = list(trainings)
    for number in range(rounds):
        if number and is_over():
            break
        batches = [task.tokens(generator) for _ in range(TURN)]
        for variant in order:
            turn = partial(trainings[variant].run, batches)
            seconds[variant].append(seconds_of(task.device, turn) / TURN)
        order = order[1:] + order[:1]
    return seconds


def ratios(seconds: dict[str, list[float]], against: str) -> dict[str, Figures]:
    """Spread of the ratios of each variant to another one, paired by round."""
    base = seconds[against]
    return {
        variant: spread([mine / theirs for mine, theirs in zip(taken, base, strict=True)])
        for variant, taken in seconds.items()
    }


def best_compiled(seconds: dict[str, list[float]]) -> str | None:
    """The fastest way of `torch.compile` that was measured."""
    measured = [variant for variant in COMPILED if variant in seconds]
    return min(measured, key=lambda variant: median(seconds[variant]), default=None)


def kernels_per_step(training: Training, tokens: Tensor) -> int | None:
    """Kernels that the device runs in one step."""
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
    """As in Chowdhery et al., PaLM (2022), appendix B: for each token 6 for each weight, without
    positions, which are only looked up, and 12 * layers * width * length for attention."""
    model: Any = task.model()
    config, tokens = model.config, task.batch * task.length
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= model.transformer.wpe.weight.numel()
    attention = 12 * config.n_layer * config.n_embd * task.length
    return float((6 * weights + attention) * tokens)


def peak_flops(name: str) -> float | None:
    """Of a device of that name; None where it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that the device reads and writes in a large copy."""
    size = 2**31 if device == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = median(seconds_of(device, lambda: target.copy_(source)) for _ in range(10))
    return 2 * size / seconds


class KernelTime(NamedTuple):
    """A Triton kernel alone: its name, the bytes that it has to move, and its seconds."""

    name: str
    bytes: float
    seconds: float


@contextmanager
def kernels_measured() -> Iterator[list[KernelTime]]:
    """Measure each Triton kernel that is compiled inside instead of running it.

    Yields:
        A list that is filled at the end, with one entry for each call of a kernel.
    """
    from torch._inductor import config
    from torch._inductor.runtime import triton_heuristics

    found: list[KernelTime] = []
    with config.patch(profile_bandwidth=True, profile_bandwidth_regex=""):
        triton_heuristics.collected_calls.clear()
        yield found
        for milliseconds, gigabytes, _, name in triton_heuristics.collected_calls:
            found.append(KernelTime(name, gigabytes * 1e9, milliseconds / 1e3))


def triton_bandwidth(task: Task) -> Figures:
    """Bytes and seconds of the compiled kernels of a step, each measured alone.

    Only what a kernel has to read and write counts. Kernels are not run, so results are none.
    """
    use_caches("kernels")
    generator = torch.Generator().manual_seed(0)
    with kernels_measured() as kernels:
        training = Training("graphopt inductor", task)
        training.run([task.tokens(generator) for _ in range(2)])
    found: Figures = {}
    for kind, prefix in (("pointwise", "triton_poi"), ("reductions", ("triton_red", "triton_per"))):
        chosen = [kernel for kernel in kernels if kernel.name.startswith(prefix)]
        found[kind] = {
            "kernels": len(chosen),
            "bytes": sum(kernel.bytes for kernel in chosen),
            "seconds": sum(kernel.seconds for kernel in chosen),
        }
    return found


def in_fresh_process(job: str, task: Task, timeout: float, **more: Any) -> Figures:
    """Do a job of this benchmark in another process, which finds the compile caches filled."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu_step.py")
    request = json.dumps({"job": job, "task": asdict(task), **more})
    try:
        done = subprocess.run(
            [sys.executable, script, "--job", request],
            capture_output=True,
            text=True,
            timeout=max(timeout, 1),
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": "there was no time left"}
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr.strip().splitlines() or ["it failed"])[-1]}
    result: Figures = json.loads(done.stdout.splitlines()[-1])
    return result


def job(request: Figures) -> Figures:
    """What `in_fresh_process` asks for."""
    task = Task(**request["task"])
    jobs: dict[str, Callable[[], Figures]] = {
        "warm": lambda: prepare(request["variant"], task, torch.Generator().manual_seed(0))[1],
        "bandwidth": lambda: triton_bandwidth(task),
    }
    return jobs[request["job"]]()
