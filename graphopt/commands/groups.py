"""The process groups of a saved graph, in a process that has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.saved.groups import sizes_of_saved


@contextmanager
def groups_present(graph_module: fx.GraphModule) -> Iterator[None]:
    """While active, this process is rank 0 of the groups that a loaded graph communicates in, so
    that passes can ask for their sizes; nothing is sent."""
    sizes = sizes_of_saved(graph_module)
    if dist.is_initialized() or not sizes:
        yield
        return
    _compat.start_fake_group(max(2, *sizes.values()))
    try:
        for name, size in sizes.items():
            if _compat.group_named(name) is None:
                group: Any = dist.new_group(list(range(size)))
                _compat.name_group(group, name)
        yield
    finally:
        dist.destroy_process_group()
