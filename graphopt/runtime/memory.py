"""Control of memory: Python's collector of reference cycles, and CPU memory of each step."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value


@contextmanager
def collector_paused() -> Iterator[None]:
    """While active, Python does not collect reference cycles.

    What was made meanwhile counts as old afterwards, so that it is not gone through at once, but
    with all the rest, when that is next due.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                count_all_as_old()
            gc.enable()


BEFORE_AGEING: list[Callable[[], None]] = []
"""Called before new objects count as old, by those who look for new ones: captures of all
threads."""


def count_all_as_old() -> None:
    """Moves all objects to the oldest generation, quickly. Nothing may be frozen (`gc.freeze`)."""
    for look in tuple(BEFORE_AGEING):
        look()
    gc.freeze()
    gc.unfreeze()


@contextmanager
def frozen_objects_seen() -> Iterator[None]:
    """While active, `gc.get_referrers` also finds frozen objects. If there were any, all objects
    are frozen afterwards."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.collect(0)  # for those who look at what is new when the collector runs
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h."""

_LARGEST_IN_HEAP = 2**25
"""Bytes: the most that glibc comes to by itself. What is larger goes back when it is freed, so that
no hole of that size stays in the heap."""

_KEPT = 2**31 - 1
_SMALL = 2**17
"""Bytes below which glibc keeps tensors anyway."""


def keep_memory_of(graph: fx.Graph) -> None:
    """Makes malloc keep freed memory, if a graph computes large tensors on the CPU."""
    values = (known_value(node) for node in graph.nodes if node.op == "call_function")
    if any(_is_large(tensor) for value in values for tensor in tensors_in(value)):
        _keep_memory()


def _is_large(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return _compat.has_symbolic_shape(tensor) or tensor.nbytes >= _SMALL


@cache
def _keep_memory() -> None:
    if _is_glibc() and not says_of_malloc(os.environ):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        set_option(_TRIM_THRESHOLD, _KEPT)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False


def says_of_malloc(environment: Mapping[str, str]) -> bool:
    """True if environment variables choose an allocator or configure glibc's."""
    if "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return True
    if "malloc" in environment.get("LD_PRELOAD", ""):
        return True
    return any(name.startswith("MALLOC_") and name.endswith("_") for name in environment)
