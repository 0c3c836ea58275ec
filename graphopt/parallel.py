"""How a step communicates: what the capture adds to the gradients of a bare step."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from graphopt.errors import CollectiveError


@dataclass(frozen=True)
class DataParallel:
    """Data parallelism with the arithmetic of `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        group: the process group to average over; None is the default group.
        broadcast: before the first step, copy parameters and buffers from the group's rank 0.
        broadcast_buffers: before each forward, copy buffers from the group's rank 0
            (one collective per dtype; none without buffers or under `TrainStep.no_sync`).
        timeout: seconds to wait for the other ranks when they agree on a capture.

    >>> import graphopt
    >>> graphopt.DataParallel(broadcast_buffers=False).broadcast_buffers
    False
    """

    group: dist.ProcessGroup | None = None
    broadcast: bool = True
    broadcast_buffers: bool = True
    timeout: float = 120.0


@dataclass(frozen=True)
class Manual:
    """The step does its own communication; the capture adds none.

    >>> import graphopt, torch
    >>> step = graphopt.compile(lambda m, x: m(x), parallel=graphopt.Manual())
    >>> step(torch.nn.ReLU(), torch.ones(2))
    tensor([1., 1.])
    """


Parallel = DataParallel | Manual


def resolve(parallel: Parallel | None) -> Parallel:
    """`None` means DDP's behaviour when several ranks run, and nothing in a single process."""
    if parallel is None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return DataParallel() if several else Manual()
    if isinstance(parallel, DataParallel) and not (dist.is_available() and dist.is_initialized()):
        raise CollectiveError(
            "DataParallel() averages over a process group, and there is none, or none any more",
            hint="call torch.distributed.init_process_group() first; parallel=None averages where"
            " there is a group",
        )
    if isinstance(parallel, (DataParallel, Manual)):
        return parallel
    raise TypeError(
        f"parallel={parallel!r}: pass None, graphopt.DataParallel(...) or graphopt.Manual()"
    )
