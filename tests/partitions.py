"""How tests of partitioning say where nodes belong, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def by_name(**partitions: Any) -> Callable[[fx.Node], Any]:
    return lambda node: partitions[node.name]


def children(module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Submodules by name, in the order in which they are called."""
    called = module.graph.find_nodes(op="call_module")
    return {str(n.target): module.get_submodule(n.target) for n in called}


def ops(module: fx.GraphModule) -> list[str]:
    return [f"{node.op} {node.name}" for node in module.graph.nodes]
