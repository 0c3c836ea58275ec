"""Reuse of CPU memory that a step frees and the next one needs.

The allocator of the C library gives memory back to the system: each tensor above a size that it
learns (at most 32 MB), and the end of its heap above twice that. The next step then gets fresh
pages, which the kernel fills with zeros one by one: 6 to 10 % of a small step.
A step of training needs the same memory each time, so from the first
captured one on the process keeps it. What it holds at its fullest does not grow by that.

Only glibc is told so. A process whose environment says something about its allocator
(`MALLOC_TRIM_THRESHOLD_=131072`, say, which is glibc's own) is left as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.ir.metadata import known_value

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
