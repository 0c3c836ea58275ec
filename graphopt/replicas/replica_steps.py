"""Training steps on several replicas, iteration after iteration, late work included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.graph_utils import follows_output_convention, get_output, is_operator
from graphopt.ir.metadata import carried_index
from graphopt.iter_graph import IterGraphModule
from graphopt.replicas.lockstep import Lockstep


class ReplicatedStep:
    """A graph module that runs for all replicas of `lockstep` at once.

    Late nodes of an `IterGraphModule` run in the next iteration, from what the replica's own
    iteration has left; `flush` runs those of the last.
    """

    def __init__(self, graph_module: fx.GraphModule, lockstep: Lockstep) -> None:
        self._module, self._lockstep = graph_module, lockstep
        self._flight: list[list[Any]] | None = None
        self._state: Sequence[Sequence[Any]] = ()
        self._derived: dict[str, fx.GraphModule] = {}

    def __call__(self, inputs: Sequence[Sequence[Any]], *, last_iter: bool = False) -> list[Any]:
        """Runs one iteration.

        Args:
            inputs: for each replica one value per placeholder; state is updated in place.
            last_iter: leave nothing in flight.

        Returns:
            What the graph returns, for each replica.
        """
        module = self._module
        if not isinstance(module, IterGraphModule) or not module.graph.late:
            return self._lockstep.run(module, inputs)
        graph = self._graph("setup" if self._flight is None else "main")
        returned = self._lockstep.run(graph, self._with_flight(inputs))
        kept = sum(carried_index(node) is not None for node in self._graph("main").graph.nodes)
        self._flight = [list(carried[len(carried) - kept :]) for _, _, carried in returned]
        self._state = inputs
        if last_iter:
            self.flush()
        return [
            self._packed(results, updates, carried[: len(carried) - kept])
            for results, updates, carried in returned
        ]

    def flush(self) -> None:
        """Runs the late work of the last iteration, if there is any."""
        if self._flight is not None:
            self._lockstep.run(self._graph("drain"), self._with_flight(self._state))
            self._flight = None

    def _with_flight(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        flight = self._flight or [[] for _ in inputs]
        return [[*values, *carried] for values, carried in zip(inputs, flight, strict=True)]

    def _graph(self, name: str) -> fx.GraphModule:
        if name not in self._derived:
            self._derived[name] = getattr(self._module, f"{name}_gm")
        return self._derived[name]

    def _packed(self, results: list[Any], updates: list[Any], carried: list[Any]) -> Any:
        graph = self._module.graph
        if follows_output_convention(graph):
            return results, updates, carried
        _, spec = _compat.tree_flatten(get_output(graph).args[0])
        return _compat.tree_unflatten(results, spec)


def results_of(graph: fx.Graph, returned: Any) -> list[Any]:
    """The values that a call returned, without state updates, which are seen in the inputs."""
    if follows_output_convention(graph):
        results, _, carried = returned
        return [*results, *carried]
    nodes = _compat.tree_leaves(get_output(graph).args[0])
    values = _compat.tree_leaves(returned)
    return [v for node, v in zip(nodes, values, strict=True) if not _is_update(node)]


def _is_update(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_operator(node.target, "aten::copy_")
