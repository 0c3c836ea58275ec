"""Removal of dead nodes, and of nodes that only rename a value."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from graphopt.graph_utils.tensor_metadata import same_kind
from graphopt.ir.operators import is_operator, operator_of, written


def is_needed(node: fx.Node) -> bool:
    """True if a node must stay even without users: it updates state, other ranks join it, or later
    random numbers depend on it.

    >>> from graphopt.graph_utils import find_nodes, is_needed
    >>> [node.name for node in find_nodes(gm.graph, is_needed)][-1]
    'output'
    """
    known = operator_of(node)
    if node.is_impure() or known.collective or known.marker or known.wait or known.random:
        return True
    return any(state.op in ("placeholder", "get_attr") for state in written(node))


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Removes nodes without users or effects, and returns how many.

    `fx.Graph.eliminate_dead_code` would remove collectives that other ranks will join.

    >>> from graphopt.graph_utils import eliminate_dead_code
    >>> with gm.graph.inserting_before(gm.graph.output_node()):
    ...     dead = gm.graph.call_function(torch.ops.aten.t.default, (gm.graph.output_node().prev,))
    >>> eliminate_dead_code(gm.graph)
    1
    """
    dead = [n for n in reversed(graph.nodes) if not n.users and not is_needed(n)]
    removed = 0
    while dead:
        node = dead.pop()
        inputs = list(node.all_input_nodes)
        graph.erase_node(node)
        removed += 1
        dead += [n for n in inputs if not n.users and not is_needed(n)]
    return removed


def remove_identities(graph: fx.Graph) -> None:
    """Removes nodes that return their argument: `detach`, `alias`, and copies of the same kind.

    Values never change in a functional graph, so that sharing them cannot be seen.

    >>> from graphopt.graph_utils import remove_identities
    >>> graph = torch.fx.Graph()
    >>> copy = graph.call_function(torch.ops.aten.detach.default, (graph.placeholder("x"),))
    >>> _ = graph.output(copy)
    >>> remove_identities(graph)
    >>> [node.name for node in graph.nodes]
    ['x', 'output']
    """
    sources: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_operator(node.target, "aten::detach", "aten::alias"):
            source = node.args[0]
        elif is_operator(node.target, "aten::copy") and same_kind(*node.args[:2]):
            source = node.args[1]
        else:
            continue
        sources[node] = sources.get(source, source)
    replace_all(sources)
    eliminate_dead_code(graph)


def replace_all(replacements: Mapping[fx.Node, fx.Node]) -> None:
    """Replaces nodes in all their users at once; one at a time would be quadratic for long lists,
    such as those of a fused optimizer."""

    def replaced(node: fx.Node) -> fx.Node:
        return replacements.get(node, node)

    for user in dict.fromkeys(user for node in replacements for user in node.users):
        user.args = fx.map_arg(user.args, replaced)
        user.kwargs = fx.map_arg(user.kwargs, replaced)
