"""What `DataParallel` adds to a step while it is traced: averaged gradients, broadcast buffers.

The arithmetic is that of DistributedDataParallel (torch/csrc/distributed/c10d/reducer.cpp): each
gradient is multiplied by 1/ranks in its own dtype and summed over the ranks. A gradient is averaged
once its accumulation is complete, that is when the step first reads it, or at the end of the step;
the captured graph then launches the collective right after the gradient it averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from graphopt.errors import GraphOptError
from graphopt.tracing.tagging import Tagger


class UnagreedParameterError(GraphOptError):
    """A parameter gets a gradient that the ranks have not agreed to average."""


@dataclass(frozen=True)
class Group:
    """A process group as operators name it."""

    name: str
    ranks: int


def average(gradient: torch.Tensor, group: Group) -> torch.Tensor:
    """The mean of `gradient` over the ranks: same shape, strides and dtype."""
    scaled = torch.mul(gradient, 1.0 / group.ranks)
    if scaled.is_contiguous():
        return _sum(scaled, group)
    order = _storage_order(scaled)
    total = _sum(scaled.permute(order), group)
    return total.permute([order.index(dim) for dim in range(len(order))])


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of a contiguous tensor over the ranks."""
    launched = torch.ops._c10d_functional.all_reduce(tensor, "sum", group.name)
    return torch.ops._c10d_functional.wait_tensor(launched)  # type: ignore[no-any-return]


def _storage_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor, in the order in which it lies contiguous in memory.

    Collectives want contiguous tensors. Among equal strides dimensions of size 1 come last, where
    they keep their stride when the order is undone.
    """
    shape, stride = tensor.shape, tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], shape[dim] == 1))


@dataclass
class GradientAverager:
    """Averages the gradients of one traced step.

    Args:
        parameters: traced parameter by qualified name.
        group: ranks to average over.
        agreed: names of the parameters that all ranks average, in launch order; None while the
            ranks have not agreed yet, then every gradient is averaged in the order it is ready.
        persistent: ids of traced gradients that existed before the step; DDP updates them in place.
    """

    parameters: dict[str, torch.Tensor]
    group: Group
    tagger: Tagger
    agreed: Sequence[str] | None
    persistent: frozenset[int] = frozenset()
    ready: dict[str, None] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    backward_ran: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While active, notes which gradients a backward completes, in order."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self.ready.pop(name, None)
            self.ready[name] = None
            self.used.setdefault(name)

        return accumulated

    def reduce_ready(self) -> None:
        """Average every gradient accumulated since the last time, in the agreed order."""
        if not self.ready:
            return
        names = list(self.ready) if self.agreed is None else list(self.agreed)
        foreign = [name for name in self.ready if name not in names]
        if foreign:
            raise UnagreedParameterError(foreign[0])
        first_time = not self.backward_ran
        pending, self.ready, self.backward_ran = self.ready, {}, True
        for name in names:
            if name in pending or (first_time and name not in self.used):
                with torch.no_grad(), self.tagger.sending(name):
                    self._reduce(self.parameters[name])

    def _reduce(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = average(torch.zeros_like(parameter), self.group)
            return
        mean = average(gradient, self.group)
        if id(gradient) in self.persistent:
            gradient.copy_(mean)
        else:
            parameter.grad = mean


def broadcast_buffers(module: nn.Module, group: Group) -> None:
    """Copy the buffers of the traced `module` from the group's rank 0: one collective per dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        launched = torch.ops._c10d_functional.broadcast(flat, 0, group.name)
        received = torch.ops._c10d_functional.wait_tensor(launched)
        parts = torch.split(received, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
