"""Views in a graph: nodes that share memory, and the readers behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import (
    aliased,
    argument_at,
    is_collective,
    is_copy,
    is_item,
    is_wait,
    may_alias,
    nodes_in,
    operator_of,
    written,
)


def is_pure_view(node: fx.Node) -> bool:
    """True if a node computes nothing: each of its results is certainly a view."""
    known = operator_of(node)
    if known.item:
        source = node.all_input_nodes[0]
        return not holds_several(source) or is_pure_view(source)
    if known.view:
        return True
    if not known.may_alias or known.writes or known.wait or known.collective:
        return False
    return any(_share_storage(node, source) for source in aliased(node))


def may_be_view(node: fx.Node) -> bool:
    """True if it is unknown whether the result of a node is a view."""
    known = operator_of(node)
    if not known.may_alias or known.item or known.writes or known.wait or known.collective:
        return False
    return not is_pure_view(node)


def is_update(node: fx.Node) -> bool:
    """True if a node updates its first argument and returns it."""
    updated = written(node) if node.op == "call_function" else []
    return bool(updated) and node.args[0] is updated[0]


def shared_with(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose memory the value of a node may share."""
    known = operator_of(node)
    if known.item:
        source, index = node.args
        return _item_of(source, index)
    if not known.may_alias:
        return []
    if known.listed and holds_several(node):
        return []  # each item shares that of its own entry
    if len(known.aliases) > 1:
        return []
    return aliased(node)


def _item_of(source: Any, index: Any) -> list[fx.Node]:
    """Returns the nodes with which an item shares memory; an item of a tensor is a view of it."""
    if not isinstance(source, fx.Node):
        return []
    known = operator_of(source)
    several = holds_several(source)
    if several and known.own_memory:
        return []
    if known.one_tensor_twice or not several:
        return [source]
    if known.item:  # of a list within the results
        return _item_of(*source.args)
    if not known.aliases:
        return []
    result = known.aliases[0]
    if len(known.aliases) > 1:
        result = known.aliases[index] if isinstance(index, int) else sum(known.aliases, ())
    found: list[fx.Node] = []
    for position in result:
        value = argument_at(source, position)
        if known.listed and isinstance(value, (list, tuple)) and isinstance(index, int):
            value = value[index]
        found += nodes_in(value)
    return found


def base_of(node: fx.Node) -> fx.Node:
    """Returns the node that made the tensor whose memory `node` certainly shares."""
    *_, base = viewed(node)
    return base


def viewed(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node and the nodes of which it certainly is a view, down to the base."""
    yield node
    while is_pure_view(node) or is_update(node) or is_wait(node):
        node = node.all_input_nodes[0]
        yield node


def inner_bases(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields the nodes `inside` a part that it must return so that the view `node` can be made
    outside."""
    if node not in inside:
        return
    if is_pure_view(node) or is_update(node) or is_wait(node):
        for source in node.all_input_nodes[:1]:
            yield from inner_bases(source, inside)
    else:
        yield node


def outer_bases(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields the nodes outside a part that it must receive so that the view `node` can be made
    inside."""
    if is_pure_view(node):
        for source in node.all_input_nodes:
            yield from outer_bases(source, inside)
    elif node in inside:
        return
    elif is_update(node):
        yield from outer_bases(node.all_input_nodes[0], inside)
    else:
        yield node


def view_tail(node: fx.Node) -> list[fx.Node]:
    """Returns `node` and all views of it.

    >>> from graphopt.comm import get_all_comm_blocks, view_tail
    >>> wait = get_all_comm_blocks(gm)[0].wait_nodes[0]
    >>> view_tail(wait) is not None
    True
    """
    found = [node]
    for member in found:  # grows while it is read
        found += [user for user in member.users if is_only_view(user, member)]
    return found


def is_only_view(user: fx.Node, node: fx.Node) -> bool:
    """True if `user` is a view of `node` and nothing else."""
    return may_alias(user) and not written(user) and user.all_input_nodes == [node]


def readers_through_views(root: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read the storage of `root`, directly or through views.

    >>> from graphopt.graph_utils import find_nodes, is_wait, readers_through_views
    >>> len(list(readers_through_views(find_nodes(gm.graph, is_wait)[0]))) > 0
    True
    """
    found: set[fx.Node] = set()
    for _, reader in reads_through_views(root):
        if reader not in found:
            found.add(reader)
            yield reader


def reads_through_views(root: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields (reader, argument) for each direct or indirect reader of the storage of `root`."""
    views = {root}
    pending = [root]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op == "output":
                continue
            yield node, user
            if user not in views and may_alias(user) and not is_copy(user):
                views.add(user)
                pending.append(user)


def launch_of(wait: fx.Node) -> fx.Node | None:
    """Returns the collective that a wait completes, found through items and views, or None."""
    node: object = next(iter(wait.all_input_nodes), None)
    while isinstance(node, fx.Node) and not is_collective(node):
        if not may_alias(node) or is_wait(node):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def is_awaited(launch: fx.Node) -> bool:
    """True if the graph contains a wait for a collective."""
    return any(is_wait(u) or (is_item(u) and any(map(is_wait, u.users))) for u in launch.users)


def holds_several(node: fx.Node) -> bool:
    """True if an operator returns a list or tuple."""
    return isinstance(known_value(node), (list, tuple))


def _share_storage(node: fx.Node, source: fx.Node) -> bool:
    result, value = known_value(node), known_value(source)
    if not isinstance(result, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return _compat.storage_key_of_value(result) == _compat.storage_key_of_value(value)
