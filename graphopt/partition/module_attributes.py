"""Module attributes that nodes name by their targets."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import fx, nn

from graphopt.errors import PartitionError


class Attributes:
    """Looks up attributes in the graph's module, then in another one."""

    def __init__(self, graph_module: fx.GraphModule, root: nn.Module | None) -> None:
        self._owners: list[nn.Module] = [graph_module, *([root] if root is not None else [])]
        self._found: dict[str, Any] = {}

    def find(self, node: fx.Node) -> Any:
        """Returns the module, tensor or other object that a node names.

        Raises:
            PartitionError: there is nothing of that name.
        """
        target = str(node.target)
        if target not in self._found:
            self._found[target] = self._search(target)
        if self._found[target] is None:
            raise PartitionError(f"%{node.name} names {target}, which the module does not have")
        return self._found[target]

    def holds_module(self, node: fx.Node) -> bool:
        """True if a node reads a module, such as a branch of `torch.cond`."""
        return node.op == "get_attr" and isinstance(self.find(node), nn.Module)

    def owner(self, path: str) -> nn.Module | None:
        """Returns the module at a path, or None if that is something else."""
        found = self._search(path)
        return found if isinstance(found, nn.Module) else None

    def _search(self, target: str) -> Any:
        path = target.split(".") if target else []
        for owner in self._owners:
            try:
                return reduce(getattr, path, owner)
            except AttributeError:
                continue
        return None
