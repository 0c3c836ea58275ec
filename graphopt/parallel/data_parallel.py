"""Data parallelism: averaged gradients, and the buffers of rank 0.

The arithmetic is that of DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp): each
gradient is multiplied by 1/ranks in its own dtype and summed over the ranks.

    mean = reduce_gradient(g, "w", 2, group)      scaled   = mul(g, 0.5)
                                                  launched = all_reduce(scaled, "sum", group)
                                                  mean     = wait_tensor(launched)

`average` and `receive_buffers` say it once, for tensors and for nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphopt import _compat
from graphopt.ir.metadata import fake_value
from graphopt.parallel.kinds import OverRanks

if TYPE_CHECKING:
    from torch import fx, nn

    from graphopt.parallel.markers import Group


@dataclass(frozen=True)
class DataParallel(OverRanks):
    """Data parallelism with the arithmetic of `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        group: the process group to average over; None is the default group.
        broadcast: before the first step, copy parameters and buffers from the group's rank 0.
        broadcast_buffers: before each forward, copy buffers from the group's rank 0
            (one collective per dtype; none without buffers or under `TrainStep.no_sync`). Where the
            ranks are on several machines, as `LOCAL_WORLD_SIZE` says, in a process group of their
            own, which the first call makes (`graphopt.ranks.buffer_groups`).
        timeout: seconds to wait for the other ranks when they agree on a capture.

    >>> import graphopt
    >>> graphopt.DataParallel(broadcast_buffers=False).broadcast_buffers
    False
    """

    meaning: ClassVar[str] = "averaged"

    def expand(self, graph: fx.Graph) -> int:
        """Averages marked gradients, and broadcasts marked buffers from rank 0."""
        from graphopt.parallel.markers import (
            Nodes,
            group_of,
            markers_of,
            marks_gradient,
            replace_marker,
        )

        markers = markers_of(graph)
        for marker in markers:
            shared: Any = average if marks_gradient(marker) else receive_buffers
            replace_marker(marker, shared(marker.args[0], group_of(marker), Nodes(marker)))
        return len(markers)


Value = Any
"""A tensor, or a node that stands for one."""

Call = Callable[..., Any]
"""Calls an operator with arguments, or makes a node that does. Lists of results are lists."""


def run(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls an operator immediately, instead of adding a node."""
    return target(*args, **kwargs)


def average(gradient: Value, group: Group, call: Call = run) -> Value:
    """Averages a gradient over the ranks; the result has its shape, dtype and dense strides."""
    scaled = call(torch.ops.aten.mul.Tensor, gradient, 1.0 / group.ranks)
    if _tensor(scaled).is_contiguous():
        return summed(scaled, group, call)
    order = _storage_order(_tensor(scaled))
    total = summed(call(torch.ops.aten.permute.default, scaled, order), group, call)
    back = [order.index(dim) for dim in range(len(order))]
    return call(torch.ops.aten.permute.default, total, back)


def summed(tensor: Value, group: Group, call: Call) -> Value:
    """Sums a contiguous tensor over the ranks."""
    functional = torch.ops._c10d_functional
    launched = call(functional.all_reduce.default, tensor, "sum", group.name)
    return call(functional.wait_tensor.default, launched)


def _storage_order(tensor: torch.Tensor) -> list[int]:
    """The permutation of a dense tensor's dimensions that makes it contiguous.

    Collectives want contiguous tensors. Among equal strides dimensions of size 1 come last, where
    they keep their stride when the order is undone.
    """
    shape, stride = tensor.shape, tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], shape[dim] == 1))


def receive_buffers(buffers: Sequence[Value], group: Group, call: Call = run) -> list[Value]:
    """Broadcasts buffers from rank 0 of the group, contiguous, with one collective per dtype."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, buffer in enumerate(buffers):
        by_dtype.setdefault(_tensor(buffer).dtype, []).append(index)
    received: list[Value] = [None] * len(buffers)
    for indices in by_dtype.values():
        parts = _received([buffers[index] for index in indices], group, call)
        for index, part in zip(indices, parts, strict=True):
            received[index] = part
    return received


def _received(buffers: Sequence[Value], group: Group, call: Call) -> list[Value]:
    """Broadcasts buffers of one dtype from rank 0."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    flat = call(aten.cat.default, [_flat(buffer, call) for buffer in buffers])
    launched = call(functional.broadcast.default, flat, 0, group.name)
    received = call(functional.wait_tensor.default, launched)
    sizes = [_tensor(buffer).numel() for buffer in buffers]
    parts = call(aten.split_with_sizes.default, received, sizes)
    shapes = [list(_tensor(buffer).shape) for buffer in buffers]
    return [call(aten.view.default, p, s) for p, s in zip(parts, shapes, strict=True)]


def _flat(buffer: Value, call: Call) -> Value:
    """Flattens a tensor as `reshape(-1)` does, by a copy if no view exists."""
    try:
        _tensor(buffer).view(-1)
    except (RuntimeError, ValueError):  # of a tensor, of a fake one
        buffer = call(torch.ops.aten.clone.default, buffer, memory_format=torch.contiguous_format)
    return call(torch.ops.aten.view.default, buffer, [-1])


def _tensor(value: Value) -> torch.Tensor:
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else fake_value(value)
    return tensor


def broadcast_buffers(module: nn.Module, group: Group) -> None:
    """Overwrites a module's buffers with those of rank 0 of the group, immediately."""
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    put_received(buffers, receive_buffers(buffers, group))


def put_received(buffers: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Copies received values into buffers without a new version: as with DDP, autograd does not
    count saved buffers as changed."""
    for buffer, value in zip(buffers, received, strict=True):
        with _compat.version_kept(buffer):
            buffer.copy_(value)
