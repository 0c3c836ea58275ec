"""Ranks agree on what they are about to do, before they do it.

Everything goes through the store of the process group, with a timeout: a rank that plans other
communication, or that could not capture its step, becomes an error on every rank in place of a
hang.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import is_collective

_rounds: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def next_round(group: dist.ProcessGroup, topic: str) -> int:
    """How often this rank has met the others of a group for a topic, this time included."""
    rounds = _rounds.setdefault(group, Counter())
    rounds[topic] += 1
    return rounds[topic]


@dataclass(frozen=True)
class Channel:
    """Where the ranks of one group meet for one step function.

    Attributes:
        topic: the same text on all ranks, different for different step functions.
        timeout: seconds to wait for the other ranks.
    """

    group: dist.ProcessGroup
    topic: str
    timeout: float

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Give `mine`, JSON-like, to all ranks; returns every rank's, by rank in the group.

        Raises:
            SpmdMismatchError: a rank did not come in time, or came with an ``"error"``.
        """
        store, keys, rank = self._post(mine)
        if not _compat.wait_for_keys(store, keys, self.timeout):
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise SpmdMismatchError(
                f"rank {rank} waited {self.timeout:g} s for rank(s) {missing} at {self.topic}\n"
                "  hint:  every rank has to call the step equally often; look at the output of the"
                " missing ranks"
            )
        everyone = [json.loads(store.get(key)) for key in keys]
        for other, theirs in enumerate(everyone):
            if other != rank and theirs.get("error"):
                raise SpmdMismatchError(
                    f"rank {other} could not capture the step, so rank {rank} does not run it"
                    f" either.\n  rank {other} said:  {theirs['error']}"
                )
        return everyone

    def give_up(self, error: str) -> None:
        """Tell the ranks that wait in `exchange` that this one does not come, and why."""
        self._post({"error": error})

    def _post(self, mine: dict[str, Any]) -> tuple[dist.Store, list[str], int]:
        number = next_round(self.group, self.topic)
        prefix = f"graphopt/{self.group.group_name}/{self.topic}/{number}"
        keys = [f"{prefix}/{rank}" for rank in range(self.group.size())]
        store, rank = _compat.default_store(), self.group.rank()
        store.set(keys[rank], json.dumps(mine))
        return store, keys, rank


def collective_plan(graph: fx.Graph) -> list[str]:
    """One line per collective, in launch order: operator, options, dtype, shape, group."""
    plan = []
    for node in graph.nodes:
        if is_collective(node):
            value = node.meta["val"]
            options = ", ".join(str(arg) for arg in node.args if not isinstance(arg, fx.Node))
            plan.append(f"{node.target}({value.dtype}{list(value.shape)}, {options})")
    return plan


def check_spmd(
    graph_module: fx.GraphModule,
    group: dist.ProcessGroup | None = None,
    timeout: float = 30.0,
) -> None:
    """Check that all ranks of a group are about to run the same collectives in the same order.

    Every rank has to call it. It talks through the group's store, not with collectives.

    Args:
        graph_module: this rank's graph, in the captured dialect.
        group: None is the default group.
        timeout: seconds to wait for the other ranks.

    Raises:
        SpmdMismatchError: naming the rank and the first difference, or the ranks that did not come.
    """
    channel = Channel(_compat.group_or_default(group), "check_spmd", timeout)
    everyone = channel.exchange({"plan": collective_plan(graph_module.graph)})
    check_same("collectives", [theirs["plan"] for theirs in everyone])


def check_same(what: str, everyone: Sequence[Sequence[str]]) -> None:
    """Raise `SpmdMismatchError` naming the first rank and line that differ from rank 0's."""
    for rank, theirs in enumerate(everyone):
        for index in range(max(len(theirs), len(everyone[0]))):
            expected = everyone[0][index] if index < len(everyone[0]) else "nothing"
            found = theirs[index] if index < len(theirs) else "nothing"
            if expected != found:
                raise SpmdMismatchError(
                    f"rank {rank} has other {what} than rank 0, first at number {index}:\n"
                    f"  rank 0:  {expected}\n  rank {rank}:  {found}\n"
                    "  hint:  all ranks have to build the same model and take the same branches"
                )


def merged_order(everyone: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The union of the ranks' names, in rank 0's order, then what each next rank adds."""
    return tuple(dict.fromkeys(name for names in everyone for name in names))
