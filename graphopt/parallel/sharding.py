"""The plan of a sharded step, and the three ways between a whole tensor and what a rank has of it.

A tensor is cut into rows, as DTensor cuts it: the first rank *owns* the first rows, and so on, and
the last one may own fewer. What a rank *holds* is a window of the flattened tensor, with its rows
in it, that begins at a multiple of 64 elements, and ends at one or at the tensor's end: kernels
round the elements behind the last full vector otherwise, so that only at such cuts elementwise
operators give the bits that they give of the whole tensor.

    whole      0 ············ 330 ············ 660 ············ 990     990 elements, 3 rows
    owned      [ rank 0      )[ rank 1       )[ rank 2        )
    windows    [ 0 ······· 350)
                       [ 320 ··············· 670)                        all of one length
                                       [ 640 ················ 990)

Where rows end at multiples of 64 anyway, windows are what the ranks own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from graphopt.ir.placement import Placement, Rows

if TYPE_CHECKING:
    import torch.distributed as dist

ALIGNED = 64
"""Elements between two cuts."""

SMALL = 64 * 1024
"""Bytes of a tensor that is replicated where its rows do not end at multiples of 64 elements."""

OF_ROWS = Placement((Rows(0),))


@dataclass(frozen=True)
class RowShards:
    """How a tensor is cut into rows.

    Attributes:
        shape: of the whole tensor.
        ranks: how many there are.
    """

    shape: tuple[int, ...]
    ranks: int

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def row(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @cached_property
    def rows(self) -> int:
        """Rows that each rank owns, but for the last ones, which may own fewer."""
        return -(-self.shape[0] // self.ranks)

    @cached_property
    def is_even(self) -> bool:
        """Whether the windows are what the ranks own, one beside the other."""
        return self.shape[0] % self.ranks == 0 and self.rows * self.row % ALIGNED == 0

    @cached_property
    def owns(self) -> tuple[range, ...]:
        """The elements that each rank owns."""
        cuts = [min(rank * self.rows, self.shape[0]) * self.row for rank in range(self.ranks + 1)]
        return tuple(range(a, b) for a, b in zip(cuts, cuts[1:], strict=False))

    @cached_property
    def length(self) -> int:
        """Elements of a window."""
        size = self.rows * self.row
        if self.is_even:
            return size
        tail = self.numel % ALIGNED
        return min(tail - (-(size + ALIGNED - 1) // ALIGNED) * ALIGNED, self.numel)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the window of each rank begins."""
        last = self.numel - self.length
        return tuple(min(owns.start // ALIGNED * ALIGNED, last) for owns in self.owns)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where in its window the elements begin that a rank owns."""
        pairs = zip(self.owns, self.starts, strict=True)
        return tuple(min(owns.start - start, self.length) for owns, start in pairs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many elements each rank owns."""
        return tuple(map(len, self.owns))

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """The shape of the rows that a rank owns."""
        return (self.lengths[rank] // self.row if self.row else 0, *self.shape[1:])


def shards_of(tensor: torch.Tensor, ranks: int) -> RowShards | None:
    """How a parameter, or a state of one, is cut; None where it is replicated: it has fewer rows
    than there are ranks, or is small and cannot be cut at multiples of 64 elements, or its rows do
    not lie one behind the other."""
    if not tensor.dim() or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    if ranks == 1 or tensor.shape[0] < ranks or not _is_contiguous(tensor):
        return None
    shards = RowShards(tuple(tensor.shape), ranks)
    small = tensor.numel() * tensor.element_size() < SMALL
    return None if small and not shards.is_even else shards


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.dtype.is_complex


def local_part(whole: torch.Tensor, shards: RowShards, rank: int) -> torch.Tensor:
    """The window of a rank, in memory of its own."""
    return whole.detach().reshape(-1).narrow(0, shards.starts[rank], shards.length).clone()


def owned_rows(window: torch.Tensor, shards: RowShards, rank: int) -> torch.Tensor:
    """The rows that a rank owns, as a view of its window."""
    part = window.narrow(0, shards.offsets[rank], shards.lengths[rank])
    return part.view(shards.shape_of(rank))


def as_dtensor(
    window: torch.Tensor, shards: RowShards, group: dist.ProcessGroup
) -> torch.Tensor:
    """A window as DTensor of the whole shape, whose local tensor are the rows that this rank owns.
    No rank speaks to another one."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shards.shape, device="meta").stride()
    rows = owned_rows(window, shards, group.rank())
    shape = torch.Size(shards.shape)
    return DTensor.from_local(
        rows, mesh_of(group, window.device), [Shard(0)], run_check=False, shape=shape, stride=stride
    )


_meshes: dict[tuple[str, str], Any] = {}


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The mesh of the ranks of a group; one object for each."""
    from torch.distributed.device_mesh import DeviceMesh

    key = (group.group_name, device.type)
    known = _meshes.get(key)
    if known is None or known.get_group() is not group:
        known = _meshes[key] = DeviceMesh.from_group(group, device.type)
    return known


def window_of(dtensor: Any, shards: RowShards, rank: int) -> torch.Tensor:
    """The window of this rank that a DTensor is about. One that was made by others, as by
    `torch.distributed.checkpoint`, gets one."""
    local = dtensor.to_local().detach()
    start = local.storage_offset() - shards.offsets[rank]
    held = local.untyped_storage().nbytes() // local.element_size()
    if start == 0 and held == shards.length and local.is_contiguous():
        return local.new_empty(0).set_(local.untyped_storage(), 0, (shards.length,), (1,))
    window = local.new_zeros(shards.length)
    rows = owned_rows(window, shards, rank)
    rows.copy_(local)
    with torch.no_grad():
        dtensor._local_tensor = rows
    return window


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
