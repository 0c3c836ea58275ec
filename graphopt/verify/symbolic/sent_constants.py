"""Constants of a graph that collectives send to other ranks, other than this rank's padding.

A rank sends zeros for a parameter that it does not use, and receives the sum of what the others
send. So two such reductions are different values, though this rank sends the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import operator_of
from graphopt.verify.values.axioms import AXIOMS, RULES
from graphopt.verify.values.call_terms import target_name
from graphopt.verify.values.terms import ScalarValue, TensorValue, Terms, canonical, whole

(_CONSTANTS,) = (axiom for axiom in AXIOMS if axiom.name == "constants")

Makers = dict[fx.Node, set[fx.Node]]
"""For each node, the makers of the constants that it consists of or is computed from."""


def sent_constants(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Returns the nodes that make constants which collectives send, directly or computed from these
    alone. The value is True where another node makes an equal constant, so that names tell them
    apart."""
    makers: Makers = {node: {node} for node in _constants(graph)}
    found: set[fx.Node] = set()
    for node in _readers(makers):
        if operator_of(node).collective:
            found.update(*(makers.get(sent, ()) for sent in node.all_input_nodes))
        else:
            _note(node, makers)
    texts = Counter(map(_text, found))
    return {node: texts[_text(node)] > 1 for node in found}


def _constants(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls that make constants, by looking up each distinct target once."""
    calls = _compat.calls_by_target(graph)
    makers = [nodes for target, nodes in calls if is_operator(target, *_CONSTANTS.operators)]
    return sorted(node for nodes in makers for node in nodes)


def _readers(makers: Makers) -> Iterator[fx.Node]:
    """Yields the readers of nodes in `makers` in graph order, while `makers` grows."""
    pending = [user for node in makers for user in node.users]
    heapify(pending)
    last = None
    while pending:
        node = heappop(pending)
        if node is last or node in makers or node.op != "call_function":
            continue
        last = node
        yield node
        if node in makers:
            for user in node.users:
                heappush(pending, user)


def _text(node: fx.Node) -> str:
    return f"{node.target} {node.args} {node.kwargs}"


def _note(node: fx.Node, makers: Makers) -> None:
    traits, sources = operator_of(node), _tensors_read(node)
    known = [makers[source] for source in sources if source in makers]
    if not known or traits.random or (traits.metadata_only and len(known) < len(sources)):
        return
    parts = traits.item or traits.elements in ("cat", "split", "slice", "same")
    if parts or len(known) == len(sources):
        makers[node] = set().union(*known)


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    held = ((n, known_value(n)) for n in node.all_input_nodes)
    return [n for n, value in held if isinstance(value, (torch.Tensor, list, tuple))]


def sent_constant(
    terms: Terms, node: fx.Node, arguments: Mapping[str, Any], *, by_name: bool
) -> TensorValue:
    """Returns the value of a constant that is sent, distinct from equal constants sent elsewhere:
    other ranks send their own values in its place.

    Args:
        arguments: of the node that makes it, by name.
        by_name: whether another node makes the same.
    """
    fake, target = fake_value(node), cast(Any, node.target)
    value = RULES[_compat.operator_name(target)].value(terms, target, dict(arguments), fake)
    like = [entry for entry in arguments.values() if isinstance(entry, TensorValue)]
    place = (*map(canonical, like), node.name if by_name or not like else None)
    if value is None:  # its size depends on values, say
        key: Any = ("constant", target_name(target), canonical(dict(arguments)), place)
    else:
        key = ("constant", tuple(terms[s.term].key for s in value.segments), place)
    given = isinstance(arguments.get("fill_value", arguments.get("s")), ScalarValue)
    return whole(terms.make(key, constant=not given), fake)
