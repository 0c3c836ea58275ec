"""Illegal edits of graphs with sizes that depend on values: of the numbers, and of what they are
sizes of."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import fx

from edit_tools import Edit, added, aten, calls, pick, renewed, replaced
from graphopt import _compat
from graphopt.graph_utils import tensors_in
from graphopt.host import is_host_call

Nodes = list[fx.Node] | None


def numbers(gm: fx.GraphModule) -> list[fx.Node]:
    """Calls that give a size, or what is computed of sizes, and are read."""
    return [node for node in calls(gm) if _is_number(node) and node.users]


def _is_number(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (torch.SymInt, int))


def _has_symbols(node: fx.Node) -> bool:
    return any(map(_compat.has_symbolic_shape, tensors_in(node.meta.get("val"))))


def _reads(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each call that reads a size, with the size."""
    for node in calls(gm):
        if not is_host_call(node):
            yield from ((node, source) for source in node.all_input_nodes if _is_number(source))


def size_exchanged(gm: fx.GraphModule, draw: Random) -> Nodes:
    """Another size is read, of whatever else."""
    found = [
        (node, size, other)
        for node, size in _reads(gm)
        for other in numbers(gm)
        if other is not size and other < node
    ]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, size, other = chosen
    node.args = tuple(replaced(list(node.args), size, other))
    return [node]


def size_exchanged_and_told(gm: fx.GraphModule, draw: Random) -> Nodes:
    """As `size_exchanged`, with the metadata that follows from it."""
    nodes = size_exchanged(gm, draw)
    if nodes is not None:
        renewed(nodes[0])
    return nodes


def size_made_plain(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A size is the number that it was when the step was captured."""
    chosen = pick(draw, _reads(gm))
    if chosen is None:
        return None
    node, size = chosen
    value = size.meta["val"]
    hint = value if isinstance(value, int) else value.node.hint
    node.args = tuple(replaced(list(node.args), size, hint + draw.choice((0, 0, 1))))
    return [node]


def size_computed_otherwise(gm: fx.GraphModule, draw: Random) -> Nodes:
    """One more or less than a size."""
    chosen = pick(draw, _reads(gm))
    if chosen is None:
        return None
    node, size = chosen
    new = added(size, draw.choice((operator.add, operator.sub, operator.mul)), size, 2)
    node.args = tuple(replaced(list(node.args), size, new))
    return [node, new]


def size_of_another_dimension(gm: fx.GraphModule, draw: Random) -> Nodes:
    """The size of another dimension, or of another tensor."""
    node = pick(draw, calls(gm, "aten::sym_size"))
    if node is None:
        return None
    source = node.args[0]
    other = pick(
        draw,
        (n for n in gm.graph.nodes if n < node and n is not source and _dims(n) >= _dims(source)),
    )
    if draw.random() < 0.5 and _dims(source) > 1:
        node.args = (source, (node.args[1] + 1) % _dims(source))
    elif other is not None:
        node.args = (other, node.args[1])
    else:
        return None
    return [node]


def _dims(node: Any) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def other_rows(gm: fx.GraphModule, draw: Random) -> Nodes:
    """What has a size by value is chosen by another mask or by other indices, and is said to have
    the size that it had."""
    found = [
        (node, source, other)
        for node in calls(gm)
        if _has_symbols(node)
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), torch.Tensor)
        for other in gm.graph.nodes
        if other < node and other is not source and _is_alike(other, source)
    ]
    chosen = pick(draw, found)
    if chosen is None:
        return None
    node, source, other = chosen
    node.args = tuple(replaced(list(node.args), source, other))
    return [node]


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and a.dim() == b.dim()


def mask_negated(gm: fx.GraphModule, draw: Random) -> Nodes:
    """The rows that were not chosen."""
    masks = [n for n in calls(gm) if n.users and _dtype(n) == torch.bool]
    node = pick(draw, masks)
    if node is None:
        return None
    reader = pick(draw, (n for n in node.users if not is_host_call(n)))
    if reader is None:
        return None
    new = added(node, aten.logical_not.default, node)
    reader.replace_input_with(node, new)
    return [new, reader]


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def range_of_a_size(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A slice, or a part of rows, of what has a size by value begins or ends elsewhere."""
    found = [n for n in calls(gm, "aten::slice", "aten::select", "aten::narrow") if _of_symbols(n)]
    node = pick(draw, found)
    if node is None or len(node.args) < 3:
        return None
    index = draw.choice(range(2, len(node.args)))
    if type(node.args[index]) is not int:
        return None
    node.args = (*node.args[:index], node.args[index] - 1, *node.args[index + 1 :])
    return [node]


def _of_symbols(node: fx.Node) -> bool:
    return any(map(_has_symbols, node.all_input_nodes))


def assumption_lost(gm: fx.GraphModule, draw: Random) -> Nodes:
    """A size is taken for granted that is no longer looked at."""
    node = pick(draw, (n for n in gm.graph.nodes if is_host_call(n)))
    if node is None:
        return None
    near = node.all_input_nodes
    gm.graph.erase_node(node)
    return list(near)


def assumption_of_another(gm: fx.GraphModule, draw: Random) -> Nodes:
    """The size of something else is looked at."""
    node = pick(draw, (n for n in gm.graph.nodes if is_host_call(n)))
    if node is None:
        return None
    first = node.args[0]
    other = pick(draw, (n for n in gm.graph.nodes if n < node and n is not first and _dims(n)))
    if other is None:
        return None
    node.args = (other, *node.args[1:])
    return [node]


SIZE_EDITS: dict[str, Edit] = {
    "another size": size_exchanged,
    "another size, metadata renewed": size_exchanged_and_told,
    "a size as the number that it was": size_made_plain,
    "a size computed otherwise": size_computed_otherwise,
    "a size of something else": size_of_another_dimension,
    "other rows": other_rows,
    "a mask negated": mask_negated,
    "another range of rows": range_of_a_size,
    "an assumption lost": assumption_lost,
    "an assumption of something else": assumption_of_another,
}
