"""Placements of placeholders: the ranks hold a value whole, or in rows.

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
    """A placement along one axis of the mesh: all ranks have the same value."""

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Rows:
    """A placement along one axis: each rank has equally many rows of one dimension, padded at the
    end.

    Attributes:
        dim: the dimension that is cut.
    """

    dim: int = 0

    def __str__(self) -> str:
        return f"rows {self.dim}"


@dataclass(frozen=True)
class Partial:
    """A placement along one axis: the ranks' values still have to be reduced.

    Attributes:
        reduction: how, as collectives name it.
    """

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"partial {self.reduction}"


Axis = Replicate | Rows | Partial


@dataclass(frozen=True)
class Placement:
    """The part of a value that this rank holds, for each axis of the mesh.

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
        """Parses the text of a placement.

        Raises:
            ValueError: there is no such placement, as in a file of a later version.
        """
        return cls(tuple(map(_axis, text.split(", "))))

    def __str__(self) -> str:
        return ", ".join(map(str, self.axes))

    @property
    def rows(self) -> int | None:
        """The dimension that is cut along the last axis, or None."""
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
    """Returns the placement of a placeholder; the full one if none is set.

    Raises:
        ValueError: there is no such placement, as in a file of a later version.
    """
    return Placement.parse(placeholder.meta.get(PLACEMENT, "full"))


def set_placement(placeholder: fx.Node, placement: Placement) -> None:
    """Sets how the ranks hold the value of a placeholder."""
    placeholder.meta[PLACEMENT] = str(placement)
