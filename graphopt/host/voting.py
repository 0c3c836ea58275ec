"""Where ranks agree in a graph that no function has raised; see `graphopt.host.votes`."""

from __future__ import annotations

from torch import fx

from graphopt.graph_utils import find_nodes, get_output, is_collective, written
from graphopt.host import host_call_of
from graphopt.host.assumptions import Assumption
from graphopt.host.running import agree, hear
from graphopt.host.votes import Agreement
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import STATE_KINDS, input_kind, late_group, set_value

_UPDATED = STATE_KINDS | {"gradient"}


def agreement_needed_by(graph: fx.Graph) -> Agreement:
    """When ranks have to agree, for the functions that one rank's graph calls."""
    found = map(host_call_of, graph.nodes)
    calls = [call for call in found if not isinstance(call, Assumption | None)]
    return Agreement(any(not call.last for call in calls), any(not call.first for call in calls))


def commit_before(graph: fx.Graph) -> fx.Node:
    """The first update of state behind the last launch of a collective, or the output: the same
    place among the collectives on all ranks, where all agree whether the step goes on."""
    effects = Effects(graph)
    found: fx.Node | None = None
    for node in graph.nodes:
        if is_collective(node):
            found = None
        elif found is None and late_group(node) is None and _updates_state(node, effects):
            found = node
    return found or get_output(graph)


def _updates_state(node: fx.Node, effects: Effects) -> bool:
    owners = (effects.input_of(state) for state in written(node))
    return any(owner is not None and input_kind(owner) in _UPDATED for owner in owners)


def with_agreement(gm: fx.GraphModule, agreement: Agreement) -> fx.GraphModule:
    """Let all ranks agree in a graph that no function has raised; in place."""
    graph = gm.graph
    if agreement.before_updates:
        with graph.inserting_before(commit_before(graph)):
            set_value(graph.call_function(agree), None)
    if agreement.at_end:
        launches = find_nodes(graph, lambda node: is_collective(node) or node.target is agree)
        first = launches[0] if launches else get_output(graph)
        with graph.inserting_before(_outside_late_work(graph, first)):
            set_value(graph.call_function(hear), None)
    gm.recompile()
    return gm


def _outside_late_work(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The last place up to a node where no late work has begun: what raises in it loses it."""
    nodes: list[fx.Node] = list(graph.nodes)
    place = nodes.index(node)
    for group in {late_group(n) for n in nodes} - {None}:
        places = [index for index, n in enumerate(nodes) if late_group(n) == group]
        if places[0] < place <= places[-1]:
            return _outside_late_work(graph, nodes[places[0]])
    return nodes[place]
