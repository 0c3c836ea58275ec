"""Runs one graph for several replicas, node by node; collectives combine their values.

    %mm         = mm(%x, %w)          on replica 0, on replica 1, …
    %all_reduce = all_reduce(%mm)     once, from the values of all replicas
    %wait       = wait_tensor(…)      nothing to wait for

Neither processes nor threads nor a backend take part, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CollectiveError, GraphOptError
from graphopt.graph_utils import is_collective, is_random, is_wait, without_autocast
from graphopt.host import is_host_call
from graphopt.ir.operators import arguments_by_name
from graphopt.ir.rank_groups import shifted_copies
from graphopt.parallel.shard_operators import acting_as
from graphopt.replicas.exchange import exchange
from graphopt.replicas.replica_generators import ReplicaGenerators


class ReplicaError(GraphOptError, RuntimeError):
    """A node cannot be computed for the replicas; the message names it."""


Environment = dict[fx.Node, Any]


class Lockstep:
    """Runs graphs for `count` replicas at once.

    Args:
        count: the number of replicas: the ranks of the default process group.
        groups: ranks of each process group by name; a group that has only some of the ranks stands
            for its shifted copies as well. None: `torch.distributed` is asked.
        callbacks: whether functions given to `graphopt.callback` are called.

    They are called for replica 0 alone. Each replica
    draws random numbers of its own; the numbers go on from one `run` to the next.
    """

    def __init__(
        self,
        count: int,
        groups: Mapping[str, Sequence[int]] | None = None,
        *,
        callbacks: bool = True,
    ) -> None:
        if count < 1:
            raise ValueError(f"{count} replicas: give a whole number of at least 1")
        self.count = count
        self._groups, self._callbacks = groups, callbacks
        self._generators = ReplicaGenerators()

    def run(self, graph_module: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Runs a graph once for all replicas.

        Args:
            inputs: for each replica one value per placeholder; tensors may be written to, and no
                two replicas may share them.

        Returns:
            What the graph returns, for each replica.

        Raises:
            CollectiveError: a collective cannot be computed: ranks send different shapes, say.
            ReplicaError: any other node cannot.
        """
        environments: list[Environment] = [{} for _ in range(self.count)]
        unused = _last_uses(graph_module.graph)
        given = [iter(values) for values in inputs]
        with torch.no_grad(), without_autocast():
            for node in graph_module.graph.nodes:
                if node.op == "placeholder":
                    results = [next(values) for values in given]
                elif node.op == "output":
                    return [_arguments(node, values)[0][0] for values in environments]
                else:
                    results = self._results(graph_module, node, environments)
                for environment, result in zip(environments, results, strict=True):
                    environment[node] = result
                    for done in unused.get(node, ()):
                        del environment[done]
        raise AssertionError("a graph ends in an output")

    def _results(
        self, graph_module: fx.GraphModule, node: fx.Node, environments: Sequence[Environment]
    ) -> list[Any]:
        try:
            return self._run_node(graph_module, node, environments)
        except GraphOptError:
            raise
        except Exception as error:
            raise ReplicaError(f"{error}\n  > {node.format_node()}") from error

    def _run_node(
        self, graph_module: fx.GraphModule, node: fx.Node, environments: Sequence[Environment]
    ) -> list[Any]:
        if node.op == "get_attr":
            return self._constants(graph_module, node)
        calls = [_arguments(node, environment) for environment in environments]
        if is_collective(node):
            return self._communicate(node, calls)
        if is_wait(node):
            return [args[0] for args, _ in calls]
        function = _function(graph_module, node)
        if is_host_call(node):
            if not self._callbacks:
                return [None] * self.count
            return [function(*calls[0][0], **calls[0][1])] + [None] * (self.count - 1)
        if is_random(node):
            return [self._draw(function, replica, *calls[replica]) for replica in range(self.count)]
        results = []
        for replica, (args, kwargs) in enumerate(calls):
            with acting_as(replica):
                results.append(function(*args, **kwargs))
        return results

    def _constants(self, graph_module: fx.GraphModule, node: fx.Node) -> list[Any]:
        """A copy of a constant for each replica, since a graph may write to it."""
        value = attrgetter(str(node.target))(graph_module)
        if not isinstance(value, torch.Tensor):
            return [value] * self.count
        return [value, *(value.clone() for _ in range(1, self.count))]

    def _draw(self, function: Any, replica: int, args: Any, kwargs: Any) -> Any:
        with self._generators.of(replica, [*args, *kwargs.values()]):
            return function(*args, **kwargs)

    def _communicate(self, node: fx.Node, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        target = node.target
        assert isinstance(target, _compat.OpOverload)
        bound = [arguments_by_name(target, args, kwargs) for args, kwargs in calls]
        results: list[Any] = [None] * self.count
        try:
            for ranks in self._divisions(str(bound[0]["group_name"])):
                received = exchange(target, [bound[rank] for rank in ranks])
                for rank, result in zip(ranks, received, strict=True):
                    results[rank] = result
        except CollectiveError as error:
            raise CollectiveError(f"{error}\n  > {node.format_node()}") from None
        return results

    def _divisions(self, group: str) -> list[list[int]]:
        """All ranks divided into sets that communicate: a group and its shifted copies."""
        ranks = self._ranks_of(group)
        found = list(islice(shifted_copies(ranks), self.count // len(ranks)))
        if {rank for copy in found for rank in copy} != set(range(self.count)):
            raise CollectiveError(
                f"group {group!r} has ranks {sorted(ranks)}: {self.count} ranks do not divide into"
                " such groups"
            )
        return found

    def _ranks_of(self, group: str) -> Sequence[int]:
        found = _compat.ranks_of_group(group) if self._groups is None else self._groups.get(group)
        if found is None:
            raise CollectiveError(f"there is no process group {group!r}")
        return found


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The values that are used last by each node."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                found.setdefault(node, []).append(value)
    return found


def _arguments(node: fx.Node, environment: Environment) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), environment.__getitem__)
    return args, kwargs


def _function(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "call_function":
        return node.target
    if node.op == "call_module":
        return graph_module.get_submodule(str(node.target))
    return lambda self, *args, **kwargs: getattr(self, str(node.target))(*args, **kwargs)
