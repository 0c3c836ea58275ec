"""How the ranks hold what a placeholder stands for."""

from __future__ import annotations

from enum import Enum

from torch import fx

from graphopt.ir.metadata import PLACEMENT


class Placement(str, Enum):
    """What of a value is on this rank. A text, which files hold.

    Attributes:
        FULL: all of it: nothing has to be sent to read it or to save it.
    """

    FULL = "full"


def placement_of(placeholder: fx.Node) -> Placement:
    """The placement of a placeholder; full, where nothing is said.

    Raises:
        ValueError: there is no such placement, as in a file of a later version.
    """
    return Placement(placeholder.meta.get(PLACEMENT, Placement.FULL))


def set_placement(placeholder: fx.Node, placement: Placement) -> None:
    """Say how the ranks hold what a placeholder stands for."""
    placeholder.meta[PLACEMENT] = placement.value
