"""The sharding of tensors by rows, and conversions between whole tensors, windows and DTensors.

shards_of     whether and how a parameter is cut (`graphopt.ir.rows`)
local_part    whole tensor → window
as_dtensor    window → DTensor, which others see
window_of     DTensor → window, which the graph takes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphopt import _compat
from graphopt.ir.rows import RowShards
from graphopt.parallel.hybrid import mesh_of_ranks

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

SMALL = 64 * 1024
"""Bytes of a tensor that is replicated where its rows do not end at multiples of 64 elements."""


def shards_of(tensor: torch.Tensor, ranks: int) -> RowShards | None:
    """The division of a parameter or optimizer state into rows. None if it stays replicated: too
    few rows, too small to be cut at multiples of 64 elements, or rows not contiguous."""
    if not tensor.dim() or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    if ranks == 1 or tensor.shape[0] < ranks:
        return None
    if not tensor.is_contiguous() or tensor.dtype.is_complex:
        return None
    shards = RowShards(tuple(tensor.shape), ranks)
    small = tensor.numel() * tensor.element_size() < SMALL
    return None if small and not shards.is_even else shards


def local_part(whole: torch.Tensor, shards: RowShards, rank: int) -> torch.Tensor:
    """A copy of one rank's window of a whole tensor."""
    return whole.detach().reshape(-1).narrow(0, shards.starts[rank], shards.length).clone()


def owned_rows(window: torch.Tensor, shards: RowShards, rank: int) -> torch.Tensor:
    """The rows that a rank owns, as a view of its window."""
    part = window.narrow(0, shards.offsets[rank], shards.lengths[rank])
    return part.view(shards.shape_of(rank))


def as_dtensor(
    window: torch.Tensor,
    shards: RowShards,
    mesh: DeviceMesh,
    wanted: Callable[[torch.Tensor], torch.Tensor] = lambda made: made,
) -> torch.Tensor:
    """Wraps a window as a DTensor of the whole shape, whose local tensor is this rank's rows. No
    rank speaks to another one.

    Args:
        mesh: along whose last dimension the tensor is cut.
        wanted: makes a parameter of it, say.
    """
    from torch.distributed.tensor import Replicate, Shard

    stride = torch.empty(shards.shape, device="meta").stride()
    place = mesh.get_coordinate()
    assert place is not None
    rows = owned_rows(window, shards, place[-1])
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return _wrapped(rows, mesh, placements, shards.shape, stride, wanted)


def without_offset(dtensor: Any) -> Any:
    """A DTensor of the same memory that can be copied and saved: torch gives one that a DTensor's
    `detach` makes the offset of its local tensor, and takes its memory for its own then."""
    local = _compat.local_of(dtensor)
    mesh, placements = dtensor.device_mesh, list(dtensor.placements)
    return _wrapped(local, mesh, placements, tuple(dtensor.shape), dtensor.stride())


def _wrapped(
    rows: torch.Tensor,
    mesh: DeviceMesh,
    placements: list[Any],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    wanted: Callable[[torch.Tensor], torch.Tensor] = lambda made: made,
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    like = torch.empty_like(rows)  # a DTensor takes over the offset, and cannot be copied then
    made: Any = wanted(
        DTensor.from_local(
            like, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    )
    _compat.set_local(made, rows)
    found: torch.Tensor = made
    return found


_meshes: dict[tuple[str, ...], DeviceMesh] = {}


def mesh_of(axes: Sequence[dist.ProcessGroup], device: torch.device) -> DeviceMesh:
    """The device mesh of process groups, one for each dimension; cached."""
    key = (*(axis.group_name for axis in axes), device.type)
    known = _meshes.get(key)
    if known is None or any(known.get_group(i) is not axis for i, axis in enumerate(axes)):
        known = _meshes[key] = _made_mesh(axes, device)
    return known


def _made_mesh(axes: Sequence[dist.ProcessGroup], device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if len(axes) == 1:
        return DeviceMesh.from_group(axes[0], device.type)
    replicas, shards = axes
    ranks = torch.tensor(mesh_of_ranks(shards, replicas))
    names = ("replicate", "shard")
    return DeviceMesh.from_group(list(axes), device.type, mesh=ranks, mesh_dim_names=names)


def window_of(dtensor: Any, shards: RowShards, rank: int) -> torch.Tensor:
    """This rank's window behind a DTensor. One that was made by others, as by
    `torch.distributed.checkpoint`, gets one."""
    local: torch.Tensor = dtensor.to_local().detach()
    start = local.storage_offset() - shards.offsets[rank]
    held = local.untyped_storage().nbytes() // local.element_size()
    if start == 0 and held == shards.length and local.is_contiguous():
        return local.new_empty(0).set_(local.untyped_storage(), 0, (shards.length,), (1,))
    window = local.new_zeros(shards.length)
    rows = owned_rows(window, shards, rank)
    rows.copy_(local)
    with torch.no_grad():
        _compat.set_local(dtensor, rows)
    return window


def is_dtensor(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
