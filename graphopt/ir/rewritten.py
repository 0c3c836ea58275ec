"""Records of the parts of a graph that `graphopt.rewrite` exchanged, for checks of the result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

_KEY = "_graphopt_rewritten"


@dataclass(frozen=True)
class RewrittenPlace:
    """One part of a graph that another one stands for now.

    Attributes:
        pattern: name of the pattern.
        inputs: the nodes that it reads from outside.
        names: what the inputs are called in messages.
        before, after: its outputs, as they were and as they are; the former are not in the graph.
        outputs: what these are called in messages.
        tolerance: see `graphopt.rewrite`.
    """

    pattern: str
    inputs: tuple[fx.Node, ...]
    names: tuple[str, ...]
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    outputs: tuple[str, ...]
    tolerance: float | None


def rewritten_places(graph: fx.Graph) -> list[RewrittenPlace]:
    """The places rewritten since `forget_places`; copies of a graph have none."""
    return list(vars(graph).get(_KEY, ()))


def note_place(graph: fx.Graph, place: RewrittenPlace) -> None:
    """Remember a place."""
    vars(graph).setdefault(_KEY, []).append(place)


def forget_places(graph: fx.Graph) -> None:
    """Begin anew, as before a pass."""
    vars(graph).pop(_KEY, None)
