"""Records of the parts of a graph that `graphopt.rewrite` replaced, for later checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

_KEY = "_graphopt_rewritten"


@dataclass(frozen=True)
class RewrittenPlace:
    """One replaced part of a graph.

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
    """Returns the parts replaced since `forget_places`; copies of a graph have none."""
    return list(vars(graph).get(_KEY, ()))


def note_place(graph: fx.Graph, place: RewrittenPlace) -> None:
    """Records a replaced part."""
    vars(graph).setdefault(_KEY, []).append(place)


def forget_places(graph: fx.Graph) -> None:
    """Drops all records, as before a pass."""
    vars(graph).pop(_KEY, None)
