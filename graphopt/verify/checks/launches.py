"""The order in which a graph launches collectives, which all ranks have agreed on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch import fx

from graphopt.ir.operators import is_collective
from graphopt.ranks.spmd import launch_part
from graphopt.verify.problems import Problem

_IN_PLACE = re.compile(r"_\.(?=\w+$)")
"""Matches the underscore at the end of an in-place operator's name."""


class Launch(NamedTuple):
    """One launch of a collective, with a text by which ranks compare it.

    Attributes:
        text: equal where other ranks see no difference: also in place, or on a part of a graph.
        node: that launches it.
    """

    text: str
    node: fx.Node


def launches_of(gm: fx.GraphModule) -> list[Launch]:
    """Returns all launches of collectives in the order in which they run, called graphs
    included."""
    found: list[Launch] = []
    for node in gm.graph.nodes:
        if node.op == "call_module":
            called = gm.get_submodule(str(node.target))
            inner = getattr(called, "graph_module", called)
            found += launches_of(inner) if isinstance(inner, fx.GraphModule) else []
        elif is_collective(node):
            found.append(launch_of(node))
    return found


def launch_of(node: fx.Node) -> Launch:
    """Returns the description of the collective that a node launches."""
    name = _IN_PLACE.sub(".", str(node.target))
    return Launch(f"{name}{[launch_part(arg) for arg in node.args]}", node)


def other_launches(before: Sequence[Launch], after: Sequence[Launch]) -> Problem | None:
    """Returns the first problem where a graph launches other collectives, or in another order, or
    None."""
    for index, (one, other) in enumerate(zip_longest(before, after)):
        if one is None or other is None or one.text != other.text:
            now = "nothing" if other is None else other.text
            return Problem(
                f"it launches other collectives than the ranks agreed on, first at number {index}:"
                f" {now} in place of {'nothing' if one is None else one.text}",
                () if other is None else (other.node,),
            )
    return None
