"""Rules for late nodes: which may run one iteration late, and the errors about the others.

Let *late* be the nodes that run in the next iteration. Then nothing of this iteration may need
them; they may not draw random numbers, whose order is fixed; and what they update must not be read
in the next iteration before they have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from graphopt import _compat
from graphopt.errors import IterationError
from graphopt.graph_utils import get_output, get_outputs, is_random, readers_through_views, written
from graphopt.host import is_host_call
from graphopt.ir.metadata import STATE_KINDS, input_kind, is_held, is_returned, source_line
from graphopt.ir.placement import placement_of

LIVE_STATE = STATE_KINDS | {None}
"""Kinds of placeholders that may be updated late, since reads of them between steps are noticed.
None: a hand-made graph without kinds."""


def why_now(state: fx.Node) -> str | None:
    """Returns the reason why a state cannot be updated in the next iteration, or None."""
    if is_held(state):
        return f"{named(state)}, to which other code refers, so that its uses are unknown"
    return why_now_everywhere(state)


def why_now_everywhere(state: fx.Node) -> str | None:
    """Returns the reason why a state cannot be updated in the next iteration, by facts that are the
    same on all ranks, or None."""
    kind = input_kind(state)
    if kind not in LIVE_STATE:
        return f"a {kind}, which may be read between two steps"
    if is_returned(state):
        return f"{named(state)}, which the step returns"
    if placement_of(state).rows is not None:
        return f"{named(state)}, of which a DTensor has rows: its uses are unknown"
    return None


def check_late(graph_module: fx.GraphModule) -> list[str]:
    """Returns the problems of a graph's late nodes as texts; none for a plain GraphModule.

    >>> from graphopt.iter_graph import check_late
    >>> check_late(gm)
    []
    """
    late: Mapping[fx.Node, fx.Node] = getattr(graph_module.graph, "late", {})
    if not late:
        return []
    return [*_problems(graph_module.graph, late, list(late)), *_order_problems(late, late)]


def refuse_move(
    graph: fx.Graph, late: Mapping[fx.Node, fx.Node], nodes: Sequence[fx.Node], target: fx.Node
) -> None:
    """Raises `IterationError` unless `nodes` may run late, before `target`."""
    _refuse_target(graph, target)
    after = {**late, **dict.fromkeys(nodes, target)}
    if target in after:
        raise IterationError(
            f"the destination {named(target)} is itself moved: name a node that stays in its"
            " iteration, or none, for the last place that is early enough"
        )
    near = {*nodes, *(user for node in nodes for user in node.users if user in after)}
    problem = next(_problems(graph, after, nodes), None) or next(_order_problems(after, near), None)
    if problem is not None:
        raise IterationError(problem)


def default_destination(
    graph: fx.Graph, late: Mapping[fx.Node, fx.Node], nodes: Sequence[fx.Node]
) -> fx.Node:
    """Returns the node before which late `nodes` must run: the first reader of what they update, or
    the output. Linear in the number of readers."""
    moved = {*late, *nodes}
    states = dict.fromkeys(state for node in nodes for state in written(node))
    readers = (r for state in states for r in readers_through_views(state) if r not in moved)
    return min(readers, default=get_output(graph))


def refuse_foreign(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Raises `IterationError` unless `nodes` are calls in this graph."""
    for node in nodes:
        _refuse_other_graph(graph, node)
        if node.op in ("placeholder", "output", "get_attr"):
            raise IterationError(f"{named(node)} is a {node.op}: only calls can be moved")


def _refuse_other_graph(graph: fx.Graph, node: fx.Node) -> None:
    if not isinstance(node, fx.Node) or node.graph is not graph:
        raise IterationError(f"{node!r} is not a node of this graph")


def _refuse_target(graph: fx.Graph, target: fx.Node) -> None:
    _refuse_other_graph(graph, target)
    if target.op in ("placeholder", "get_attr"):
        raise IterationError(
            f"the destination {named(target)} is a {target.op}; name the node that reads it"
        )


def _problems(
    graph: fx.Graph, late: Mapping[fx.Node, fx.Node], nodes: Iterable[fx.Node]
) -> Iterator[str]:
    outputs = get_outputs(graph)
    updates = set(outputs.updates)
    returned = set(_leaves(outputs.results)) | set(_leaves(outputs.carried))
    for node in nodes:
        if node in returned and node not in updates:
            yield (
                f"{named(node)} would run one iteration late, but the step returns it (or it stays"
                " in .grad): a late node may not feed an output"
            )
        if is_random(node):
            yield f"{named(node)} draws random numbers, whose order is fixed: it cannot be late"
        if is_host_call(node):
            yield f"{named(node)} calls a function of the program's: it cannot be late"
        for user in node.users:
            if user not in late and user.op != "output":
                yield (
                    f"{named(user)} needs {named(node)} in this iteration: move it as well, or"
                    f" leave both"
                )
        for state in written(node):
            yield from _update_problems(node, state, late)


def _update_problems(
    update: fx.Node, state: fx.Node, late: Mapping[fx.Node, fx.Node]
) -> Iterator[str]:
    destination = late[update]
    reason = why_now(state)
    if reason is not None:
        yield f"{named(update)} updates {reason}: keep it"
    for reader in readers_through_views(state):
        if reader not in late and reader < destination:
            yield (
                f"{named(reader)} reads {named(state)} before {named(destination)}, where the"
                f" late update {named(update)} would stand: choose a destination that is not later"
            )
        earlier = reader in late and reader < update
        if earlier and late[reader] > destination:
            yield f"{named(reader)} would read {named(state)} after {named(update)} updated it"


def _order_problems(late: Mapping[fx.Node, fx.Node], nodes: Iterable[fx.Node]) -> Iterator[str]:
    for node in nodes:
        for source in node.all_input_nodes:
            if source in late and late[node] < late[source]:
                yield f"{named(node)} would run before {named(source)}, which it needs"


def _leaves(values: Any) -> list[fx.Node]:
    return [leaf for leaf in _compat.tree_leaves(values) if isinstance(leaf, fx.Node)]


def named(node: fx.Node) -> str:
    """Formats a node's name with the user's line, for messages."""
    return f"%{node.name}{place_of(node)}"


def place_of(node: fx.Node) -> str:
    """Formats the user's line that a node comes from, in brackets; empty where it is unknown."""
    source = source_line(node)
    return f" ({source})" if source is not None else ""
