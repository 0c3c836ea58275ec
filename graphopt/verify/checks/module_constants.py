"""A check that each constant of a module is still the same object under its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from graphopt.ir.bits import same_bits
from graphopt.verify.problems import Problem
from graphopt.verify.values.remembered_calls import same_constant


def constant_problems(
    before: fx.GraphModule | fx.Graph | None, after: fx.GraphModule | fx.Graph
) -> Iterator[Problem]:
    """Yields a problem for each constant of the module that is not the one before."""
    if not isinstance(before, fx.GraphModule) or not isinstance(after, fx.GraphModule):
        return
    there = {str(node.target) for node in before.graph.nodes if node.op == "get_attr"}
    for node in after.graph.nodes:
        if node.op != "get_attr" or str(node.target) not in there:
            continue
        if not same_object(attribute(before, node), attribute(after, node)):
            yield Problem(f"the constant {node.target} of the module is another one", (node,))


def attribute(module: nn.Module | None, node: fx.Node) -> Any:
    """Returns the module attribute that a node reads, or None if it does not exist."""
    found: Any = module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def same_object(one: Any, other: Any) -> bool:
    """True if two module constants are the same object, or equal bit for bit."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return str(one.graph) == str(other.graph)
    return same_constant(one, other)
