"""Ranks tell each other that no function called by `graphopt.callback` has raised.

A rank whose function raises goes on until all ranks have launched the same collectives, and says
then through the group's store that it ends the step. The others, which ask there, end it as well:
no rank waits in a collective that another does not launch, and none has updated its parameters.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.errors import SpmdMismatchError
from graphopt.graph_utils import get_output, is_collective, written
from graphopt.host_run import agree
from graphopt.ir.effects import Effects
from graphopt.iter_graph.running import GROUP
from graphopt.spmd import next_round

_STATE = ("parameter", "buffer", "optimizer_state", "gradient")


@dataclass
class Votes:
    """The votes of one step function on the ranks of one group.

    Attributes:
        topic: the same text on all ranks, different for different step functions.
        timeout: seconds to wait for the other ranks.
    """

    group: dist.ProcessGroup
    topic: str
    timeout: float
    _number: int = field(default=0, init=False)
    _before: int = field(default=0, init=False)

    def cast(self) -> None:
        """Say that all is well here, and wait until all other ranks have said so.

        Raises:
            SpmdMismatchError: a function has raised on another rank, or a rank did not come.
        """
        store, keys, rank = self._say("")
        if not _arrived(store, keys, self.timeout):
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise SpmdMismatchError(
                f"rank {rank} waited {self.timeout:g} s for rank(s) {missing} at {self.topic}\n"
                "  hint:  every rank has to call the step equally often"
            )
        for other, key in enumerate(keys):
            said = store.get(key).decode()
            if other != rank and said:
                raise SpmdMismatchError(
                    f"a function called by graphopt.callback raised on rank {other}, so rank {rank}"
                    f" ends the step as well\n  rank {other} said:  {said}"
                )
        if self._before:  # everybody has read what was said before
            store.delete_key(self._key(self._before, rank))

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks, at their next vote, that this one does not come, and why."""
        self._say("".join(traceback.format_exception_only(error)).strip() or "an error")

    def _say(self, what: str) -> tuple[dist.Store, list[str], int]:
        self._before, self._number = self._number, next_round(self.group, f"votes {self.topic}")
        store, rank = _compat.default_store(), self.group.rank()
        keys = [self._key(self._number, other) for other in range(self.group.size())]
        store.set(keys[rank], what)
        return store, keys, rank

    def _key(self, number: int, rank: int) -> str:
        return f"graphopt/callbacks/{self.group.group_name}/{self.topic}/{number}/{rank}"


def _arrived(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are in the store before the time is over."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError for TCPStore, a bare RuntimeError for FileStore
        return bool(store.check(keys))
    return True


def commit_before(graph: fx.Graph) -> fx.Node:
    """The first update of state behind the last launch of a collective, or the output: the same
    place among the collectives on all ranks, where all agree whether the step goes on."""
    effects = Effects(graph)
    found: fx.Node | None = None
    for node in graph.nodes:
        if is_collective(node):
            found = None
        elif found is None and node.meta.get(GROUP) is None and _updates_state(node, effects):
            found = node
    return found or get_output(graph)


def _updates_state(node: fx.Node, effects: Effects) -> bool:
    owners = (effects.input_of(state) for state in written(node))
    return any(owner is not None and owner.meta.get("kind") in _STATE for owner in owners)


def with_agreement(gm: fx.GraphModule) -> fx.GraphModule:
    """Let all ranks agree, before a graph updates state, that no function has raised; in place."""
    with gm.graph.inserting_before(commit_before(gm.graph)):
        gm.graph.call_function(agree).meta["val"] = None
    gm.recompile()
    return gm
