"""Sizes of the process groups of a saved graph, since groups themselves are not saved."""

from __future__ import annotations

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.ir.operators import argument, is_collective

KEY = "group_sizes"
"""Where `gm.meta` of a loaded graph holds them."""


def sizes_of_saved(graph_module: fx.GraphModule) -> dict[str, int]:
    """The sizes of a loaded graph's process groups, by name.

    >>> from graphopt.saved.group_sizes import sizes_of_saved
    >>> sizes_of_saved(gm)
    {}
    """
    return dict(graph_module.meta.get(KEY, {}))


def sizes_now(graph_module: fx.GraphModule) -> dict[str, int]:
    """The sizes of a graph's process groups, by name, as far as they are known.

    >>> from graphopt.saved.group_sizes import sizes_now
    >>> sizes_now(gm)
    {}
    """
    found = sizes_of_saved(graph_module)
    for node in graph_module.graph.nodes:
        if not is_collective(node):
            continue
        name = str(argument(node, "group_name"))
        ranks = _compat.ranks_of_group(name) if dist.is_initialized() else None
        said = argument(node, "group_size")
        if ranks is not None:
            found[name] = len(ranks)
        elif isinstance(said, int):
            found[name] = said
    return found
