"""The process groups that a saved graph needs, in a process without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import fx

from graphopt._compat import process_groups
from graphopt.saved.group_sizes import sizes_of_saved


@contextmanager
def groups_present(graph_module: fx.GraphModule) -> Iterator[None]:
    """While active, fake process groups of the sizes in a loaded graph exist, with this process
    as rank 0."""
    sizes = sizes_of_saved(graph_module)
    if dist.is_initialized() or not sizes:
        yield
        return
    process_groups.start_fake_group(max(2, *sizes.values()))
    try:
        for name, size in sizes.items():
            if process_groups.group_named(name) is None:
                group: Any = dist.new_group(list(range(size)))
                process_groups.name_group(group, name)
        yield
    finally:
        dist.destroy_process_group()
