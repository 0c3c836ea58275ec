"""Which constants of a graph are sent to other ranks, and are not just padding of this one.

A rank sends zeros for a parameter that it does not use; what comes back is what the others send for
that parameter. Two such reductions are two values, though this rank sends the same for both.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.verify.axioms import AXIOMS
from graphopt.verify.traits import traits_of

(_CONSTANTS,) = (axiom for axiom in AXIOMS if axiom.name == "constants")


def sent_constants(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that make constants of which collectives send elements, unless computed with."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [
        n for node in graph.nodes if traits_of(node).collective for n in node.all_input_nodes
    ]
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        made_by = maker(node)
        if made_by is not None:
            found.add(made_by)
        elif traits_of(node).elements in ("cat", "split", "slice") or _passes_on(node):
            pending += node.all_input_nodes
    return found


def maker(node: fx.Node) -> fx.Node | None:
    """The node whose constants a node passes on, changed alike or not at all."""
    while node.op == "call_function":
        if is_operator(node.target, *_CONSTANTS.operators):
            return node
        sources = _tensors_read(node)
        same = traits_of(node).elements in ("same", "pointwise") and not traits_of(node).collective
        if len(sources) != 1 or not same:
            return None
        node = sources[0]
    return None


def _passes_on(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    elements = traits_of(node).elements
    return elements == "same" or (elements == "pointwise" and len(_tensors_read(node)) == 1)


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
