"""Normalization of waits to one wait for each tensor, which all of graphopt expects.

    launch = all_reduce_coalesced([x, y])    launch = all_reduce_coalesced([x, y])
    waits  = wait_tensors(launch)            item   = launch[0]
    a      = waits[0]                        item_1 = launch[1]
    b      = waits[1]                        a      = wait_tensor(item)
                                             b      = wait_tensor(item_1)

From torch 2.15 on coalesced functional collectives end in one `wait_tensors`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import WAIT_FOR_SEVERAL, call_function_with_meta, find_nodes, is_operator
from graphopt.ir.metadata import fake_value, has_value


def split_waits(graph: fx.Graph) -> int:
    """Replaces each wait for several tensors by single waits. Returns how many were replaced."""
    targets = [target for target, _ in _compat.calls_by_target(graph)]
    if not any(is_operator(target, WAIT_FOR_SEVERAL) for target in targets):
        return 0
    found = find_nodes(graph, lambda node: is_operator(node.target, WAIT_FOR_SEVERAL))
    for node in found:
        _split(graph, node)
    return len(found)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    new: Callable[..., fx.Node] = graph.call_function
    if has_value(node):
        new = partial(call_function_with_meta, graph)
    with graph.inserting_before(node):
        waits = [
            new(torch.ops._c10d_functional.wait_tensor.default, (tensor,))
            for tensor in _tensors(node, new)
        ]
    for wait in waits:
        wait.meta = {**node.meta, **wait.meta}
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(waits[cast(int, user.args[1])])
            graph.erase_node(user)
    _replace_by_list(node, waits)
    graph.erase_node(node)


def _tensors(node: fx.Node, new: Callable[..., fx.Node]) -> list[fx.Node]:
    waited = node.args[0]
    if not isinstance(waited, fx.Node):
        return list(cast(Any, waited))
    count = len(fake_value(waited)) if has_value(waited) else len(cast(Any, waited.args[0]))
    return [new(operator.getitem, (waited, index)) for index in range(count)]


def _replace_by_list(node: fx.Node, waits: list[fx.Node]) -> None:
    """Redirects readers of the whole result list to a list of the waits."""

    def replaced(used: fx.Node) -> Any:
        return waits if used is node else used

    for user in list(node.users):
        user.args = fx.map_arg(user.args, replaced)
        user.kwargs = fx.map_arg(user.kwargs, replaced)
