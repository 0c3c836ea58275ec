"""Nodes that cannot run late, each with the reason.

Values that the step returns or keeps in `.grad`, that a callback is given or that another
collective sends, random numbers, updates of what is read between two steps: they, and all that they
need, cannot run one iteration late.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphopt.graph_utils import get_outputs, written
from graphopt.host import host_call_of, host_calls
from graphopt.ir.operators import calls_of, row, writers
from graphopt.iter_graph.graph import IterGraph
from graphopt.iter_graph.rules import named, place_of, why_now_everywhere


def staying_nodes(graph: IterGraph) -> dict[fx.Node, tuple[fx.Node, str]]:
    """Returns the nodes that must run in this iteration, each with the node that needs it and the
    reason.

    >>> from graphopt.iter_graph.late_exclusions import staying_nodes
    >>> [reason for _, reason in staying_nodes(graphopt.IterGraphModule(gm).graph).values()][:1]
    ['the step returns %sum_1']
    """
    found: dict[fx.Node, tuple[fx.Node, str]] = {}
    for root, reason in _roots(graph):
        pending = [] if root in found else [root]
        for node in pending:  # grows while it is read
            found[node] = root, reason
            pending += [n for n in dict.fromkeys(node.all_input_nodes) if n not in found]
            found.update((n, (root, reason)) for n in node.all_input_nodes if n not in found)
    return found


def _roots(graph: IterGraph) -> Iterator[tuple[fx.Node, str]]:
    outputs = get_outputs(graph)
    for node in outputs.results:
        if isinstance(node, fx.Node):
            yield node, f"the step returns {named(node)}"
    for node in outputs.carried:
        if isinstance(node, fx.Node):
            yield node, f"{named(node)} stays in .grad: call optimizer.zero_grad() behind step()"
    for node in host_calls(graph):
        yield node, f"{_called(node)} is given it in each step"
    for node in calls_of(graph, lambda known: known.random or known.collective):
        what = "is a collective" if row(node.target).collective else "draws random numbers"
        yield node, f"{named(node)}, which {what}, needs it"
    for node in writers(graph):
        reasons = map(why_now_everywhere, written(node)) if node.op == "call_function" else ()
        for reason in filter(None, reasons):
            yield node, f"{named(node)} updates {reason}"
    yield from _before_calls(graph)


def _before_calls(graph: IterGraph) -> Iterator[tuple[fx.Node, str]]:
    """Yields the updates that precede the last host call, which may raise: they must be done by
    then."""
    calls = [call for call in host_calls(graph) if not getattr(call.target, "last", False)]
    for node in writers(graph) if calls else ():
        if not calls[-1] < node and written(node):
            yield node, f"{named(node)} has to be done before {_called(calls[-1])}"


def _called(node: fx.Node) -> str:
    call = host_call_of(node)
    function = getattr(call and call.fn, "__qualname__", None) or repr(call and call.fn)
    return f"callback {function}{place_of(node)}"
