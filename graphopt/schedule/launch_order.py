"""The order in which the gradients of a step are sent.

A link is one machine. A gradient can be sent from the moment the backward has made it (its
release), and has to have arrived when the next forward reads its parameters (its due date). The
backward makes last what the forward reads first: sent in the order in which they are made, the most
urgent gradients stand behind all others whenever the link cannot keep up.

    made in backward    g8 g7 g6 g5 g4 g3 g2 g1
    sent as they come   g8 g7 g6 g5 g4 g3 g2 g1 |         the next forward waits for all eight
    a third held back   g8 g7 .. g5 g4 .. g2 g1 | g3 g6   it waits for six; g3 and g6 are sent
                                  end of the backward     while it computes

A share `h` of the bytes is held back, evenly among the gradients, and sent after the backward, most
urgent first. Where compute is `f` forward and `b` backward, and sending everything takes `c`, a
step takes about ``max(b, (1 - h) c) + max(f, h c)``. With ``h = f / (f + b)`` that is
``max(f + b, c)``, the least possible, for every `c`: nothing about the link has to be known. A
matrix product costs twice as much in the backward as in the forward, so `h` is about a third, and
somewhat more since the link is free until the backward has made its first gradient.

This is earliest-due-date scheduling with release times, where pieces that are small enough stand
for the preemption (Peng et al., "A generic communication scheduler for distributed DNN training
acceleration", SOSP 2019); a fixed share that is held back takes the place of interrupting what is
being sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.graph_utils import move_after


@dataclass(frozen=True)
class Send:
    """One collective with its launch, size in bytes and urgency.

    Attributes:
        launch: its node.
        nbytes: that a rank sends.
        due: position in the graph of the first node of the next iteration that needs it.
        now: whether some rank waits for it within the step.
    """

    launch: fx.Node
    nbytes: int
    due: int
    now: bool = False


@dataclass(frozen=True)
class LaunchOrder:
    """An order of sends: first those that go as they are made, then those held back, most urgent
    first.
    """

    at_once: tuple[Send, ...]
    held: tuple[Send, ...]

    @property
    def sends(self) -> tuple[Send, ...]:
        """All sends in launch order."""
        return self.at_once + self.held


def hold_back(sends: Sequence[Send], share: float) -> LaunchOrder:
    """Holds back about `share` of the bytes, spread evenly. Exempt are the last one made, and all
    up to one that some rank waits for within the step.

    Args:
        sends: in the order in which the backward makes what they send.
        share: of all bytes, from 0 to below 1.
    """
    held: list[Send] = []
    owed = 0.0
    for send in sends[:-1]:
        owed += share * send.nbytes
        if not send.now and owed >= send.nbytes / 2:
            held.append(send)
            owed -= send.nbytes
    at_once = [send for send in sends if send not in held]
    return LaunchOrder(tuple(at_once), tuple(sorted(held, key=lambda send: send.due)))


def apply_launch_order(order: LaunchOrder) -> None:
    """Moves the launches held back behind the last one that is not."""
    if order.held:
        move_after([send.launch for send in order.held], order.at_once[-1].launch)
