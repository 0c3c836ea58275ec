"""Finding and moving the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx


def find_nodes(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Returns the nodes for which `predicate` holds, in graph order.

    >>> from graphopt.graph_utils import find_nodes, is_wait
    >>> find_nodes(gm.graph, is_wait)
    [wait_tensor, wait_tensor_1]
    """
    return [node for node in graph.nodes if predicate(node)]


def graph_of(graph: fx.GraphModule | fx.Graph) -> fx.Graph:
    """Returns the graph of a graph module, or the graph itself."""
    return graph.graph if isinstance(graph, fx.GraphModule) else graph


def find_all_descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns all direct and indirect users of `nodes`, without `nodes` themselves and the output.

    >>> from graphopt.graph_utils import find_all_descendants, find_nodes, is_copy, is_wait
    >>> found = find_all_descendants(find_nodes(gm.graph, is_wait)[:1])
    >>> any(map(is_copy, found))
    True
    """
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                pending.append(user)
    return found


def with_own_inputs(node: fx.Node, counts: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Returns a node and the nodes that only it needs, directly or not, in graph order.

    Args:
        counts: whether a node may be one of them.
    """
    inside = {node}
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()  # once for each of its users: at the last all of them are known
        if source not in inside and inside.issuperset(source.users) and counts(source):
            inside.add(source)
            pending += source.all_input_nodes
    return sorted(inside)


def move_before(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Moves `nodes` to just before `target`, in the order given.

    >>> from graphopt.graph_utils import find_nodes, is_wait, move_before
    >>> waits = find_nodes(gm.graph, is_wait)
    >>> move_before(waits[:1], waits[1])
    >>> waits[0].next is waits[1]
    True
    """
    for node in nodes:
        target.prepend(node)


def move_after(nodes: Sequence[fx.Node], target: fx.Node) -> None:
    """Moves `nodes` to just after `target`, in the order given.

    >>> from graphopt.graph_utils import find_nodes, is_collective, move_after
    >>> first, second = find_nodes(gm.graph, is_collective)
    >>> move_after([first], second)
    >>> second.next is first
    True
    """
    for node in nodes:
        target.append(node)
        target = node


def after_placeholders(node: fx.Node) -> fx.Node:
    """Returns `node`, or the last placeholder if it is one: the node after which to insert.

    >>> from graphopt.graph_utils import after_placeholders
    >>> first = next(iter(gm.graph.nodes))
    >>> after_placeholders(first).op, after_placeholders(first).next.op
    ('placeholder', 'call_function')
    """
    while node.next.op == "placeholder":
        node = node.next
    return node
