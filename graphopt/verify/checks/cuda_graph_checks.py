"""A check that a graph recorded as a CUDA graph may be replayed.

A replay writes where the recording has written, so that

- a result which leaves the graph is handed out as a copy, since the next replay overwrites it;
- an input which the recording updates is read where it is: of a copy the update would be lost.

That the recordings together compute what the graph did is shown by terms, as of other stages.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, cast

from torch import fx

from graphopt.ir.effects import Effects
from graphopt.verify.problems import Problem


class RecordedModule(Protocol):
    """A module that records its graph as a CUDA graph and replays it.

    Attributes:
        graph_module: the graph that is recorded.
        leaving: for each result, True if a copy of it is returned.
        copied: positions of the inputs that replays read from copies.
    """

    graph_module: fx.GraphModule

    @property
    def leaving(self) -> Sequence[bool]:
        """For each result, True if it is still needed when the next replay may have begun."""

    @property
    def copied(self) -> Collection[int]:
        """The positions of the inputs that are copied into the recording's memory."""


def recording_problems(gm: fx.GraphModule) -> Iterator[Problem]:
    """Yields the values that a replay would overwrite or lose."""
    effects = Effects(gm.graph)
    for call in gm.graph.find_nodes(op="call_module"):
        module = gm.get_submodule(str(call.target))
        if hasattr(module, "leaving") and hasattr(module, "copied"):
            recording = cast(RecordedModule, module)
            yield from _overwritten(call, recording, effects)
            yield from _lost(call, recording)


def _overwritten(call: fx.Node, recording: RecordedModule, effects: Effects) -> Iterator[Problem]:
    for item in call.users:
        if item.target is not operator.getitem:
            yield Problem(f"all results of %{call.name} are read as one", (item,))
            continue
        index = cast(int, item.args[1])
        if effects.leaves_the_graph(item) and not recording.leaving[index]:
            text = (
                f"%{item.name} leaves the graph, and the next replay of %{call.name} overwrites it"
            )
            yield Problem(text, (item, call))


def _lost(call: fx.Node, recording: RecordedModule) -> Iterator[Problem]:
    graph = recording.graph_module.graph
    effects = Effects(graph)
    updated = effects.updated()
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if index in recording.copied and effects.key(node) in updated:
            given = cast(fx.Node, call.args[index])
            text = f"%{call.name} updates %{given.name}, of which its replays read a copy"
            yield Problem(text, (given, call))
