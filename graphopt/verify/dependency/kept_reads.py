"""Checks that finalizing a graph keeps the readers and the storages of its values.

A finalizer computes nothing anew, so a kept node must read exactly the values that it read before,
which is more than to depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.effects import Effects
from graphopt.ir.operators import is_copy, operator_of
from graphopt.ir.outputs import Outputs, get_output, get_outputs
from graphopt.verify.problems import Problem

aten = torch.ops.aten


def kept_arguments(
    before: fx.Graph, after: fx.Graph, same: Mapping[fx.Node, fx.Node]
) -> Iterator[Problem]:
    """Yields a problem for each node or output that reads another value than before, copies
    aside."""
    kept = set(same.values())
    for node, was, new, old in _readers(before, after, same):
        if len(new) != len(old):
            yield Problem(f"%{node.name} has other arguments than before", (node, was))
            continue
        for one, other in zip(new, old, strict=True):
            if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
                if isinstance(one, fx.Node) or isinstance(other, fx.Node) or one != other:
                    yield Problem(f"%{node.name} is given {one} for {other}", (node, was))
                continue
            (value, path), (expected, way) = _origin(one, same), _origin(other, kept)
            both = value in same or expected in kept  # otherwise both stand in new lists
            if both and (same.get(value), path) != (expected, way):
                yield Problem(
                    f"%{node.name} reads %{value.name}, before it read %{expected.name}",
                    (node, value, expected),
                )


def _readers(
    before: fx.Graph, after: fx.Graph, same: Mapping[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node, list[Any], list[Any]]]:
    """Yields pairs of corresponding nodes (after, before), each with the values that it reads."""
    for node, was in same.items():
        new, old = (_compat.tree_leaves((n.args, n.kwargs)) for n in (node, was))
        yield node, was, new, old
    outputs = get_outputs(after), get_outputs(before)
    new, old = ([*each.results, *each.carried] for each in outputs)
    yield get_output(after), get_output(before), new, old
    now, then = ({_destination(copy): copy for copy in each.updates} for each in outputs)
    for target, copy in now.items():
        if target in then:
            yield copy, then[target], [copy.args[1]], [then[target].args[1]]


def _destination(copy: fx.Node) -> Any:
    destination = copy.args[0]
    return destination.target if isinstance(destination, fx.Node) else None


def _origin(node: fx.Node, kept: Any) -> tuple[fx.Node, tuple[Any, ...]]:
    """Follows a value back through items, and through clones and copies that only one graph has."""
    path: tuple[Any, ...] = ()
    while True:
        if operator_of(node).item:
            path, source = (node.args[1], *path), node.args[0]
        elif node in kept:
            return node, path
        elif is_copy(node):
            source = node.args[1]
        elif node.target is aten.clone.default:
            source = node.args[0]
        else:
            return node, path
        assert isinstance(source, fx.Node)
        node = source


def shared_results(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """Yields results that moved into the storage of an input or of another result.

    Args:
        after: in the executable dialect.
    """
    was, now = _places(before), _places(after)
    first: dict[object, tuple[Any, fx.Node]] = {}
    for place, (node, key) in now.items():
        if key not in first:
            first[key] = place, node
            continue
        other, holder = first[key]
        if place not in was or other not in was or was[place][1] == was[other][1]:
            continue
        yield Problem(f"%{node.name} lies in the storage of %{holder.name}", (node, holder))


def _places(graph: fx.Graph) -> dict[Any, tuple[fx.Node, object]]:
    """Maps each input and output of a graph, inputs first, to its node and storage."""
    effects, outputs = Effects(graph), get_outputs(graph)
    found = {("input", n.target): (n, effects.key(n)) for n in graph.find_nodes(op="placeholder")}
    for kind, values in zip(Outputs._fields, outputs, strict=True):
        if kind != "updates":
            found.update(
                {
                    (kind, index): (value, effects.key(value))
                    for index, value in enumerate(values)
                    if isinstance(value, fx.Node)
                }
            )
    return found
