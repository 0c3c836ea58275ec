"""Cheap checks of a rewritten graph's interface: inputs, outputs, and unchanged nodes.

They need no evaluation: each looks at single nodes and their former selves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import get_output, get_outputs
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import argument, operator_of
from graphopt.verify.problems import Problem
from graphopt.verify.values.remembered_calls import same_arguments
from graphopt.verify.values.terms import layout_of

Same = Mapping[fx.Node, fx.Node]


def kinds_returned(graph: fx.Graph) -> list[list[Any]]:
    """Returns the shapes, dtypes and devices of results and carried values."""
    outputs = get_outputs(graph)
    return [[_kind(value) for value in values] for values in (outputs.results, outputs.carried)]


def returned_problems(before: fx.Graph, after: fx.Graph) -> Iterator[Problem]:
    """Yields a problem where results or carried values differ in number, shape or dtype."""
    was, now = get_outputs(before), get_outputs(after)
    output = get_output(after)
    for kind, old, new in (
        ("result", was.results, now.results),
        ("carried value", was.carried, now.carried),
    ):
        if len(old) != len(new):
            message = f"the graph returns {len(new)} {kind}s, before it was {len(old)}"
            yield Problem(message, (output,))
            continue
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            first, second = _kind(one), _kind(other)
            if first != second:
                nodes = (other, output) if isinstance(other, fx.Node) else (output,)
                yield Problem(f"{kind} {index} is {second}, before it was {first}", nodes)


def _kind(value: Any) -> Any:
    held = known_value(value) if isinstance(value, fx.Node) else value
    if not isinstance(held, torch.Tensor):
        return type(held).__name__ if isinstance(value, fx.Node) else repr(value)
    shape, _, dtype, device = layout_of(held)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def changed_arguments(after: fx.Graph, same: Same) -> Iterator[Problem]:
    """Yields a problem for each kept node whose operator or constant arguments changed.

    But for those that rename elements or pick from lists, which are followed by elements, and for
    the lists of list operators.
    """
    for node in after.nodes:
        was = same.get(node)
        if was is None or node.op != "call_function" or _renames(node) or _renames(was):
            continue
        if node.target != was.target:
            yield Problem(f"%{node.name} is another operator than before", (node, was))
        elif not _gets_the_same(node, was):
            yield Problem(
                f"%{node.name} gets other arguments than before, besides those that are computed",
                (node, was),
                hint="put in a new node rather than changing one that the graph had",
            )


def _renames(node: fx.Node) -> bool:
    traits = operator_of(node)
    if traits.elements in ("split", "slice"):
        return bool(argument(node, "dim") == 0)  # of rows; columns are not followed
    return traits.item or traits.elements in ("cat", "same")


def _gets_the_same(node: fx.Node, was: fx.Node) -> bool:
    """True if two calls of one operator have equal arguments, computed ones aside."""
    now, before = ((n.args, n.kwargs) for n in (node, was))
    if operator_of(node).listed:
        now, before = _without_lists(*now), _without_lists(*before)
    return same_arguments(now, before, lambda _, other: isinstance(other, fx.Node))


def _without_lists(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    lists = (tuple, list)
    plain = {name: value for name, value in kwargs.items() if not isinstance(value, lists)}
    return [None if isinstance(value, lists) else value for value in args], plain
