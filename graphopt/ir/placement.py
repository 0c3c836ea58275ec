"""Placements as data: the ranks hold a placeholder's value whole, or in rows.

    full            all of it is on every rank
    rows 0          each rank has its rows: the first ones are the first rank's, and so on
    partial sum     each rank has a summand

A placement has one such part for each axis of the mesh of ranks, as DTensor's placements do. It is
a text in files: parts joined by commas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphopt.ir.metadata import PLACEMENT


@dataclass(frozen=True)
class Replicate:
    """Along an axis, all ranks have the same."""

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Rows:
    """Along an axis, each rank has its part of one dimension: as many rows as the other ranks, the
    last ones of which may be padding.

    Attributes:
        dim: the dimension that is cut.
    """

    dim: int = 0

    def __str__(self) -> str:
        return f"rows {self.dim}"


@dataclass(frozen=True)
class Partial:
    """Along an axis, what the ranks have is still to be reduced.

    Attributes:
        reduction: how, as collectives name it.
    """

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"partial {self.reduction}"


Axis = Replicate | Rows | Partial


@dataclass(frozen=True)
class Placement:
    """The part of a value that is on this rank.

    Attributes:
        axes: one entry for each axis of the mesh.
        FULL: all of it: nothing has to be sent to read it or to save it.

    >>> Placement.parse("full, rows 0")
    Placement(axes=(Replicate(), Rows(dim=0)))
    """

    axes: tuple[Axis, ...] = (Replicate(),)

    FULL: ClassVar[Placement]

    @classmethod
    def parse(cls, text: str) -> Placement:
        """The placement that a text stands for.

        Raises:
            ValueError: there is no such placement, as in a file of a later version.
        """
        return cls(tuple(map(_axis, text.split(", "))))

    def __str__(self) -> str:
        return ", ".join(map(str, self.axes))

    @property
    def value(self) -> str:
        """The text that stands for it in files."""
        return str(self)

    @property
    def rows(self) -> int | None:
        """The dimension that is cut along the last axis; None where none is."""
        last = self.axes[-1]
        return last.dim if isinstance(last, Rows) else None


Placement.FULL = Placement()


def _axis(text: str) -> Axis:
    kind, _, rest = text.partition(" ")
    if text == "full":
        return Replicate()
    if kind == "rows" and rest.isdecimal():
        return Rows(int(rest))
    if kind == "partial" and rest:
        return Partial(rest)
    raise ValueError(f"{text!r} is no placement")


def placement_of(placeholder: fx.Node) -> Placement:
    """The placement of a placeholder; full, where nothing is said.

    Raises:
        ValueError: there is no such placement, as in a file of a later version.
    """
    return Placement.parse(placeholder.meta.get(PLACEMENT, "full"))


def set_placement(placeholder: fx.Node, placement: Placement) -> None:
    """Say how the ranks hold what a placeholder stands for."""
    placeholder.meta[PLACEMENT] = placement.value
