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
from typing import Any

from graphopt.host import HostCall
from graphopt.host.assumptions import Assumption


class VotedAssumption(Assumption):
    """The target of a node that takes a number of this rank's own, and whether all ranks go on."""

    count = 2

    def run(self, values: Sequence[Any]) -> None:
        if not bool(values[1].item()):
            error = self.failed(type(self.answer)(values[0]), values)
            error.voted = True
            raise error

    def repeats(self, other: HostCall) -> bool:
        return isinstance(other, VotedAssumption) and super().repeats(other)
