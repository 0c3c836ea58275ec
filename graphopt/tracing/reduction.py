"""What the ranks of a group share in a step, marked while it is traced.

Which values that is, and when, is what DistributedDataParallel does. A gradient is marked once its
accumulation is complete, that is when the step first reads it, or at the end of the step; buffers
are marked before each forward of a module. What becomes of the markers is said by a kind of
parallelism (`graphopt.parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from graphopt.errors import CaptureError, GraphOptError
from graphopt.parallel.data_parallel import put_received
from graphopt.parallel.markers import Group, reduce_gradient, sync_buffers
from graphopt.tracing.tagging import Tagger


class UnagreedParameterError(GraphOptError):
    """A parameter gets a gradient that the ranks have not agreed to share."""


@dataclass
class GradientMarker:
    """Marks the gradients of one traced step.

    Args:
        parameters: traced parameter by qualified name.
        group: ranks that share gradients.
        agreed: names of the parameters that all ranks mark, in launch order; None while the ranks
            have not agreed yet, then every gradient is marked in the order it is ready.
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

    def mark_ready(self) -> None:
        """Mark every gradient accumulated since the last time, in the agreed order."""
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
                    self._mark(name, self.parameters[name])

    def _mark(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = reduce_gradient(torch.zeros_like(parameter), name, self.group)
            return
        if gradient.layout is not torch.strided:
            raise _is_sparse(name)
        shared = reduce_gradient(gradient, name, self.group)
        if id(gradient) in self.persistent:
            gradient.copy_(shared)
        else:
            parameter.grad = shared


def _is_sparse(name: str) -> CaptureError:
    return CaptureError(
        f"the gradient of {name} is sparse, and a graph shares dense ones between ranks",
        hint="make it dense: Embedding(sparse=False); or let the step run eagerly:"
        " graphopt.compile(fallback='eager')",
    )


def mark_buffers(module: nn.Module, group: Group) -> None:
    """Mark the buffers of the traced `module`; they become what the ranks share."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.numel()}
    if not buffers:
        return
    given = list(buffers.values())
    put_received(given, sync_buffers(given, list(buffers), group))
