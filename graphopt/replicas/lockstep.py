"""Runs one graph for several replicas, node by node; collectives combine their values.

    %mm         = mm(%x, %w)          on replica 0, on replica 1, …
    %all_reduce = all_reduce(%mm)     once, from the values of all replicas
    %wait       = wait_tensor(…)      nothing to wait for

Neither processes nor threads nor a backend take part, so that two runs give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import islice
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
        with torch.no_grad(), without_autocast():
            found: list[Any] = _Replicas(graph_module, self).run(
                *zip(*inputs, strict=True), enable_io_processing=False
            )
        return found

    def results(
        self, node: fx.Node, function: Any, calls: Sequence[tuple[Any, Any]]
    ) -> Sequence[Any]:
        """The results of a node for each replica.

        Args:
            function: the function that it calls.
            calls: the arguments of each replica.
        """
        if is_collective(node):
            return self._communicate(node, calls)
        if is_wait(node):
            return [args[0] for args, _ in calls]
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


class _Replicas(fx.Interpreter):
    """Runs a graph whose values are sequences, of one value for each replica."""

    def __init__(self, graph_module: fx.GraphModule, lockstep: Lockstep) -> None:
        super().__init__(graph_module)
        self.extra_traceback, self._lockstep = False, lockstep

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return next(self.args_iter)
        count, target = self._lockstep.count, n.target
        if n.op == "get_attr":
            value = self.fetch_attr(str(target))
            is_tensor = isinstance(value, torch.Tensor)  # to which a graph may write
            return [value, *(value.clone() if is_tensor else value for _ in range(1, count))]
        calls = [self._arguments(n, replica) for replica in range(count)]
        if n.op == "output":
            return [args[0] for args, _ in calls]
        function: Any = self.fetch_attr(str(target)) if n.op == "call_module" else target
        if n.op == "call_method":
            function = functools.partial(_call_method, str(target))
        try:
            return self._lockstep.results(n, function, calls)
        except GraphOptError:
            raise
        except Exception as error:
            raise ReplicaError(f"{error}\n  > {n.format_node()}") from error

    def _arguments(self, node: fx.Node, replica: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = node.args, node.kwargs
        args, kwargs = fx.node.map_arg(given, lambda value: self.env[value][replica])
        return args, kwargs


def _call_method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)
