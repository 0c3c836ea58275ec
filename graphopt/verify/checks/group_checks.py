"""A check that collectives name existing process groups and their true number of ranks.

A rank that names the wrong group, or a wrong size, waits forever or dies in the transport.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, first_argument, is_collective
from graphopt.verify.problems import Problem


def changed_groups(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """Yields a problem for each collective with an unknown group or a wrong size that `before` did
    not have."""
    names = {str(argument(node, "group_name")) for node in before.nodes if is_collective(node)}
    known = {problem.message.partition(":")[2] for problem in group_problems(before, names)}
    for problem in group_problems(after, names):
        if problem.message.partition(":")[2] not in known:
            yield problem


def group_problems(graph: fx.Graph, known: set[str] | None = None) -> Iterator[Problem]:
    """Yields problems with the groups of a graph's collectives.

    Args:
        known: names of groups that are not asked for: the graph may have been made elsewhere.
    """
    sizes = _sizes_said(graph)
    for node in graph.nodes:
        if is_collective(node):
            problem = _problem(node, sizes, known)
            if problem is not None:
                yield problem


def sizes_of_groups(graph: fx.Graph) -> Iterator[Problem]:
    """Yields collectives whose group size contradicts others or does not divide what they scatter.
    For graphs read from a file, whose groups need not exist here."""
    sizes = _sizes_said(graph)
    for node in graph.nodes:
        if is_collective(node):
            problem = _of_size(node, sizes.get(str(argument(node, "group_name"))))
            if problem is not None:
                yield problem


def _sizes_said(graph: fx.Graph) -> dict[str, int]:
    """Returns the size of each group as its first collective states it."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        if is_collective(node) and argument(node, "group_size") is not None:
            found.setdefault(str(argument(node, "group_name")), int(argument(node, "group_size")))
    return found


def _problem(node: fx.Node, sizes: dict[str, int], known: set[str] | None) -> Problem | None:
    name = argument(node, "group_name")
    there = _compat.ranks_of_group(str(name)) if dist.is_initialized() else None
    if there is None and known is not None and str(name) not in known:
        hint = (
            "take the name from a collective that is there: CommBlock.group, CommBlock.group_size"
        )
        return Problem(f"%{node.name}: there is no process group {name!r}", (node,), hint)
    return _of_size(node, len(there) if there is not None else sizes.get(str(name)))


def _of_size(node: fx.Node, size: int | None) -> Problem | None:
    name = argument(node, "group_name")
    said = argument(node, "group_size")
    if said is None or size is None:
        return None
    if int(said) != size:
        return Problem(
            f"%{node.name}: says group_size={said}, but group {name!r} has {size} ranks",
            (node,),
            "graphopt.comm.CommBlock.group_size is the size of a group",
        )
    return _uneven(node, size)


def _uneven(node: fx.Node, size: int) -> Problem | None:
    """Returns a problem if what a collective scatters does not divide by the group size."""
    if not str(node.target).startswith("_c10d_functional.reduce_scatter_tensor."):
        return None
    sent = first_argument(node)
    held = known_value(sent) if isinstance(sent, fx.Node) else None
    rows = held.shape[0] if isinstance(held, torch.Tensor) and held.dim() else None
    if isinstance(rows, int) and rows % size:
        return Problem(f"%{node.name}: {rows} rows are no {size} equal parts", (node,))
    return None
