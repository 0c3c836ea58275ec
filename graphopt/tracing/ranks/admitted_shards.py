"""Which DTensors may be among the inputs of a step that is captured: those that its kind of
parallelism has sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from graphopt.parallel.sharding import is_dtensor

_admitted: ContextVar[str | None] = ContextVar("_admitted", default=None)


@contextmanager
def admitted(group: str | None) -> Iterator[None]:
    """While active, tensors that are sharded over this group may be among the inputs."""
    token = _admitted.set(group)
    try:
        yield
    finally:
        _admitted.reset(token)


def is_admitted(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sharded by rows over the group of the step that is captured."""
    group = _admitted.get()
    return group is not None and is_dtensor(tensor) and is_of_rows(tensor, group)


def is_of_rows(tensor: Any, group: str) -> bool:
    """Whether a DTensor is sharded by rows over a group."""
    mesh, placements = tensor.device_mesh, tensor.placements
    of_rows = len(placements) == 1 and placements[0].is_shard(0)
    return of_rows and mesh.get_group().group_name == group
