"""Private torch APIs of CUDA graphs and of CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from graphopt._compat.process_groups import group_named


def clear_cublas_workspaces() -> None:
    """Frees cuBLAS's workspaces, so that the next call allocates them.

    Those of a recording then lie in its memory pool, and nobody else's work writes into them.
    """
    torch._C._cuda_clearCublasWorkspaces()


def same_addresses(
    values: Sequence[Any], addresses: Sequence[int | None], indices: Sequence[int]
) -> bool:
    """True if the tensors at `indices` of `values` still have the given `addresses`."""
    # Builds without CUDA lack the function.
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is None:
        return all(values[index].data_ptr() == addresses[index] for index in indices)
    return bool(compare(list(values), list(addresses), list(indices)))


def end_allocation(device: torch.device, pool: tuple[int, int]) -> None:
    """Returns to ordinary memory allocation after a failed recording.

    Before torch 2.15, `CUDAGraph.capture_end` does not get there when it raises. Later ones do; the
    allocator then says that nothing is being recorded.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)


def uses_nccl(group_name: str) -> bool:
    """True if a process group sends CUDA tensors through NCCL."""
    group = group_named(group_name)
    try:
        return group is not None and group._get_backend(torch.device("cuda")).name() == "nccl"
    except (RuntimeError, ValueError):  # it does not take CUDA tensors
        return False
