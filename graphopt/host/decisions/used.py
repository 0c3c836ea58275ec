"""Assumption nodes that check which of the parameters unused on this rank other ranks use.

mean = all_reduce(zeros, …)          # of b, which this rank does not use
used_anywhere(mean, w, m)            # (1,): the gradient of b is `mean`; (0,): it has none
…                                    # updates
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graphopt.host.decisions.assumptions import Answer, Assumption
from graphopt.host.running import current_run


class UsedParameters(tuple[tuple[int, int], ...]):
    """The outcome of `UsedParametersQuestion`: the position of each parameter that it asks for,
    with 1 if some rank uses it, else 0."""

    __slots__ = ()

    def is_of(self, positions: Sequence[int]) -> bool:
        """True if it is the outcome of a question for these parameters."""
        return [position for position, _ in self] == list(positions)


class UsedParametersQuestion(Assumption):
    """The target of a node that asks which parameters other ranks use in this call.

    Args:
        positions: of parameters that this rank does not use, among those that the ranks have agreed
            on, counted on from one round of averages to the next. The node takes what the ranks
            have sent for them.
    """

    def __init__(self, index: int, place: str, positions: Sequence[int]) -> None:
        super().__init__(index, place, alone=True)
        self.positions, self.count = tuple(positions), len(positions)

    def outcome(self, values: Sequence[Any]) -> Answer:
        running = current_run()
        used = None if running is None else running.used_anywhere(self.positions)
        return self.answer if used is None else self.outcome_of(used)

    def outcome_of(self, used: Sequence[int]) -> UsedParameters:
        """The outcome where these parameters are used by some rank."""
        return UsedParameters(zip(self.positions, used, strict=True))


def unused(graph: fx.Graph) -> frozenset[int]:
    """The positions of the parameters that a graph does not use."""
    asked = (node.target for node in graph.nodes)
    return frozenset(
        position
        for each in asked
        if isinstance(each, UsedParametersQuestion)
        for position in each.positions
    )
