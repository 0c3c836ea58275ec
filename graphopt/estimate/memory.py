"""Measurement of the memory that is free, and of the peak that a function needs."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MACHINE = Path("/proc/meminfo")


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Runs `work` and returns the peak of the bytes it needed beyond those in use before.

    On a CUDA device those of tensors, from torch's allocator. On the CPU resident memory of the
    whole process, from the kernel; where the kernel cannot restart its mark, beyond the mark.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    before = _restart()
    work()
    return _peak() - before


def memory_left(device: torch.device) -> float:
    """The bytes that are free for tensors of this process: on the device, or its share of the
    machine's among the ranks there; `sys.maxsize` where the kernel does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not _MACHINE.exists():
        return sys.maxsize
    return _field(_MACHINE, "MemAvailable") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _restart() -> int:
    with suppress(OSError, AttributeError):  # another allocator than glibc's
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would be used again unseen
    try:
        _CLEAR.write_text("5")
    except OSError:
        return _peak()
    return _field(_STATUS, "VmRSS")


def _peak() -> int:
    if _STATUS.exists():
        return _field(_STATUS, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _field(file: Path, field: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
