"""CPU memory of training: what it keeps between steps, and what a step needs besides."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_PERIOD = 2e-4
"""Seconds between two looks at the allocator."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*names, "fordblks", "keepcost")]


def allocated_bytes() -> int:
    """The bytes that this process has allocated by malloc, on all threads."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


def kept_bytes() -> int:
    """The bytes of all tensors that Python objects refer to, each storage once; fakes have none."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def bucket_bytes(model: nn.Module) -> int:
    """The bytes of DistributedDataParallel's buckets, which no Python object refers to."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    said = model._get_ddp_logging_data().get("rebuilt_bucket_sizes") or ""
    return sum(int(size) for size in str(said).split(",") if size.strip())


def rise(work: Callable[[], object]) -> int:
    """Runs `work`; returns the peak of allocated bytes beyond those before.

    All threads count, those that communicate included. Peaks shorter than the time between two
    looks may be missed: do several steps.
    """
    gc.collect()
    before = most = allocated_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, allocated_bytes())
            time.sleep(_PERIOD)

    watcher = threading.Thread(target=watch, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_PERIOD)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(interval)
    return most - before


def has_mallinfo() -> bool:
    """True if the allocator reports its use."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")
