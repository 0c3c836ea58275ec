"""Which DTensors may be among the inputs of a step that is captured: those that its kind of
parallelism has sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from graphopt.parallel.sharding import is_dtensor, mesh_of

Axes = Sequence[dist.ProcessGroup]

_admitted: ContextVar[Axes] = ContextVar("_admitted", default=())


@contextmanager
def admitted(groups: Axes) -> Iterator[None]:
    """While active, tensors that are sharded by rows over the last of these groups, and the same
    along the others, may be among the inputs."""
    token = _admitted.set(groups)
    try:
        yield
    finally:
        _admitted.reset(token)


def is_admitted(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded by rows over the groups of the step that is captured."""
    groups = _admitted.get()
    return bool(groups) and is_dtensor(tensor) and is_of_rows(tensor, groups)


def is_of_rows(tensor: Any, groups: Axes) -> bool:
    """Whether a DTensor is sharded by rows over the ranks of the last of some groups, along the
    axes of its mesh, and the same along the others. DTensor takes meshes of the same ranks for one
    another, whatever their groups are called."""
    mesh, (*others, last) = tensor.device_mesh, tensor.placements
    if len(groups) != mesh.ndim or not last.is_shard(0):
        return False
    alike = all(placement.is_replicate() for placement in others)
    return alike and bool(mesh == mesh_of(groups, tensor.device))
