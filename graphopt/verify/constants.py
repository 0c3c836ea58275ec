"""Which constants of a graph are sent to other ranks, and are not just padding of this one.

A rank sends zeros for a parameter that it does not use; what comes back is what the others send for
that parameter. Two such reductions are two values, though this rank sends the same for both.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.verify.axioms import AXIOMS
from graphopt.verify.traits import traits_of

(_CONSTANTS,) = (axiom for axiom in AXIOMS if axiom.name == "constants")

Makers = dict[fx.Node, set[fx.Node]]
"""By node: those that made constants which some of its elements are, or are computed from alone."""


def sent_constants(graph: fx.Graph) -> dict[fx.Node, bool]:
    """The nodes that make constants which collectives send, or from which alone some elements that
    they send are computed; and for each, whether another one makes the same, so that only their
    names tell them apart."""
    makers: Makers = {}
    found: set[fx.Node] = set()
    makes: dict[int, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        known = makes.get(id(node.target))
        if known is None:
            known = is_operator(node.target, *_CONSTANTS.operators)
            makes[id(node.target)] = known
        if known:
            makers[node] = {node}
        elif makers and not makers.keys().isdisjoint(node.all_input_nodes):
            if traits_of(node).collective:
                found.update(*(makers.get(sent, ()) for sent in node.all_input_nodes))
            else:
                _note(node, makers)
    texts = Counter(map(_text, found))
    return {node: texts[_text(node)] > 1 for node in found}


def _text(node: fx.Node) -> str:
    return f"{node.target} {node.args} {node.kwargs}"


def _note(node: fx.Node, makers: Makers) -> None:
    traits, sources = traits_of(node), _tensors_read(node)
    known = [makers[source] for source in sources if source in makers]
    if not known or traits.random or (traits.metadata_only and len(known) < len(sources)):
        return
    parts = traits.item or traits.elements in ("cat", "split", "slice", "same")
    if parts or len(known) == len(sources):
        makers[node] = set().union(*known)


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    held = ((n, n.meta.get("val")) for n in node.all_input_nodes)
    return [n for n, value in held if isinstance(value, (torch.Tensor, list, tuple))]
