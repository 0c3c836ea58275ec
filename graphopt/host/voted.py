"""Decisions that each rank takes by values of its own, in a graph on several ranks: the node that
goes on only where every rank takes the branch that its graph was captured for.

    loss = model(x)                        holds      = all_reduce(isfinite(loss) == True, "min")
    if not torch.isfinite(loss):    ==>    assumption = voted(isfinite(loss), holds, w, m)
        raise …                            …the rest of the step

Where one rank takes another branch, all ranks leave their graphs, before any of them has changed
anything, and all begin the call once more, that rank with the graph of its other branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from graphopt.graph_utils import is_collective
from graphopt.host import HostCall
from graphopt.host.assumptions import Assumption


class VotedAssumption(Assumption):
    """The target of a node that takes a number of this rank's own, and whether all ranks go on."""

    count = 2

    def run(self, values: Sequence[Any]) -> None:
        if not bool(values[1].item()):
            error = self.failed(cast(Any, type(self.answer))(values[0]), values)
            error.voted = True
            raise error

    def repeats(self, other: HostCall) -> bool:
        return isinstance(other, VotedAssumption) and super().repeats(other)


def hear_votes(graph: fx.Graph) -> int:
    """Let each vote be heard before the next collective is launched: where it fails, all ranks have
    launched the same, whatever passes have done to their graphs.

    Returns:
        How many votes there are.
    """
    votes = [node for node in graph.nodes if isinstance(node.target, VotedAssumption)]
    for node in votes:
        place = launch_of_vote(node)
        for needed in _behind(place, node):
            place.append(needed)
            place = needed
    return len(votes)


def launch_of_vote(assumption: fx.Node) -> fx.Node:
    """The launch of the collective in which ranks vote."""
    node = assumption.all_input_nodes[1]
    while not is_collective(node):
        node = node.all_input_nodes[0]
    return node


def _behind(launch: fx.Node, assumption: fx.Node) -> list[fx.Node]:
    """What an assumption needs that stands behind a launch, and itself, in order."""
    found, pending = {assumption}, [assumption]
    while pending:
        for source in pending.pop().all_input_nodes:
            if launch < source and source not in found:
                found.add(source)
                pending.append(source)
    return [node for node in launch.graph.nodes if node in found]
