"""The DTensors that a captured step may have as inputs: those that its kind of parallelism
shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from graphopt.host.context import while_set
from graphopt.parallel.sharding import is_dtensor, mesh_of

Axes = Sequence[dist.ProcessGroup]

_admitted: ContextVar[Axes] = ContextVar("_admitted", default=())


def admitted(groups: Axes) -> AbstractContextManager[None]:
    """While active, inputs may be sharded by rows over the last group, and replicated over the
    others."""
    return while_set(_admitted, groups)


def is_admitted(tensor: torch.Tensor) -> bool:
    """True if a tensor is sharded by rows over the groups of the step under capture."""
    groups = _admitted.get()
    return bool(groups) and is_dtensor(tensor) and is_of_rows(tensor, groups)


def is_of_rows(tensor: Any, groups: Axes) -> bool:
    """True if a DTensor is sharded by rows over the last of the groups and replicated over the
    others. As in DTensor, meshes of the same ranks are equal."""
    mesh, (*others, last) = tensor.device_mesh, tensor.placements
    if len(groups) != mesh.ndim or not last.is_shard(0):
        return False
    alike = all(placement.is_replicate() for placement in others)
    return alike and bool(mesh == mesh_of(groups, tensor.device))
