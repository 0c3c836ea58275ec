"""Calls of compiled regions that free each input after its last use.

A function holds its arguments until it returns, so an activation that a region reads first would
stay until the region is done. Here a region takes a list and empties it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphopt.ir.metadata import set_written_arguments, written_arguments
from graphopt.lowering.subgraph import LoweredSubgraph


def boxed(*values: Any) -> list[Any]:
    """Puts the values into a list, which a compiled region empties."""
    return list(values)


def box_calls(gm: fx.GraphModule) -> fx.GraphModule:
    """Makes every `LoweredSubgraph` of a graph take a list of its inputs, in place."""
    for node in list(gm.graph.nodes):
        if node.op != "call_module":
            continue
        if not isinstance(gm.get_submodule(str(node.target)), LoweredSubgraph):
            continue
        with gm.graph.inserting_before(node):
            module = gm.graph.get_attr(str(node.target))
            box = gm.graph.call_function(boxed, node.args)
            call = gm.graph.call_method("call_boxed", (module, box), dict(node.kwargs))
        for new in (box, call):
            new.meta = dict(node.meta)
        set_written_arguments(call, [1] if written_arguments(node) else [])
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm
