"""A check that collectives name existing process groups and their true number of ranks.

A rank that names the wrong group, or a wrong size, waits forever or dies in the transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, calls_of, first_argument, is_operator
from graphopt.verify.problems import Problem


def changed_groups(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """Yields a problem for each collective with an unknown group or a wrong size that `before` did
    not have."""
    launches = calls_of(before, attrgetter("collective"))
    names = {str(argument(node, "group_name")) for node in launches}
    known = {problem.message.partition(":")[2] for problem in group_problems(before, names)}
    for problem in group_problems(after, names):
        if problem.message.partition(":")[2] not in known:
            yield problem


def group_problems(graph: fx.Graph, known: set[str] | None = None) -> Iterator[Problem]:
    """Yields collectives with an unknown group, or whose group size contradicts others or does not
    divide what they scatter.

    Args:
        known: names of groups that may be unknown to this process; None: the graph was read from a
            file, and no process is asked.
    """
    sizes = _sizes_said(graph)
    for node in calls_of(graph, attrgetter("collective")):
        name = str(argument(node, "group_name"))
        asked = known is not None and dist.is_initialized()
        there = _compat.ranks_of_group(name) if asked else None
        if there is None and known is not None and name not in known:
            hint = (
                "take the name from a collective that is there: CommBlock.group,"
                " CommBlock.group_size"
            )
            yield Problem(f"%{node.name}: there is no process group {name!r}", (node,), hint)
        else:
            yield from _of_size(node, sizes.get(name) if there is None else len(there))


def _sizes_said(graph: fx.Graph) -> dict[str, int]:
    """Returns the size of each group as its first collective states it."""
    found: dict[str, int] = {}
    for node in calls_of(graph, attrgetter("collective")):
        if argument(node, "group_size") is not None:
            found.setdefault(str(argument(node, "group_name")), int(argument(node, "group_size")))
    return found


def _of_size(node: fx.Node, size: int | None) -> Iterator[Problem]:
    """Yields a problem if a collective says another group size, or if what it scatters does not
    divide by it."""
    name, said = argument(node, "group_name"), argument(node, "group_size")
    if said is None or size is None:
        return
    if int(said) != size:
        yield Problem(
            f"%{node.name}: says group_size={said}, but group {name!r} has {size} ranks",
            (node,),
            "graphopt.comm.CommBlock.group_size is the size of a group",
        )
    elif is_operator(node.target, "_c10d_functional::reduce_scatter_tensor"):
        sent = first_argument(node)
        held = known_value(sent) if isinstance(sent, fx.Node) else None
        rows = held.shape[0] if isinstance(held, torch.Tensor) and held.dim() else None
        if isinstance(rows, int) and rows % size:
            yield Problem(f"%{node.name}: {rows} rows are no {size} equal parts", (node,))
