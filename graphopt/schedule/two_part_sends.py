"""A large gradient that is sent in two parts: one as it comes, the other held back.

                                             split    = split_with_sizes_copy(view(grad), [a, b])
all_reduce = all_reduce(grad)                first    = all_reduce(split[0])
wait       = wait_tensor(all_reduce)   ==>   second   = all_reduce(split[1])
                                             wait     = view(cat([wait(first), wait(second)]), …)

Nothing is copied when that runs (`graphopt.ir.parts`): both parts stay where the gradient is.

A share of the bytes is held back, gradient by gradient (`graphopt.schedule.launch_order`). One that
is a large part of all, as in the last layers of a convolutional net, is either sent before the
others, which the next forward needs first, or long after the link was free. In two parts, the first
travels while the rest of the backward computes, and the second behind what is more urgent.

On a link as slow as compute that gains up to 6 % of a step of such a net, on one twice as fast it
loses 1 to 5 % (`benchmarks/overlap.py --models convnet`): gloo sends two messages of a
group at once, so that the last and most urgent one shares the link with what was held back. So it
is for those who know theirs.

Numerics: with two ranks the bits are the same; a ring of more ranks adds in an order that depends
on where in what is sent an element lies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.comm.buckets import ALIGNMENT_BYTES, communicating
from graphopt.graph_utils import is_operator, is_wait
from graphopt.ir.metadata import fake_value, known_value, sent_names, set_sent_names
from graphopt.schedule.launch_order import Send

aten = torch.ops.aten

DOMINATES = 0.25
"""Share of all bytes from which one gradient is sent in two parts."""

SMALLEST = 2**19
"""Bytes of a gradient below which the time of one more collective is not worth it."""


def in_two_parts(sends: Sequence[Send]) -> list[Send]:
    """Sends so large that they can go in two parts; never the last one made, of which nothing is
    held back.

    Args:
        sends: in the order in which the backward makes what they send.

    >>> from graphopt.comm import get_all_comm_blocks
    >>> from graphopt.schedule import Send, in_two_parts
    >>> launches = [block.comm_node for block in get_all_comm_blocks(gm)]
    >>> in_two_parts([Send(launch, nbytes=8, due=0) for launch in launches])  # too small
    []
    """
    total = sum(send.nbytes for send in sends)
    least = max(SMALLEST, DOMINATES * total)
    return [
        send
        for send in sends[:-1]
        if send.nbytes >= least and not send.now and _can_be_divided(send.launch)
    ]


def _can_be_divided(launch: fx.Node) -> bool:
    if not is_operator(launch.target, "_c10d_functional::all_reduce"):
        return False
    if len(launch.users) != 1 or not all(map(is_wait, launch.users)):
        return False
    (value,) = map(known_value, launch.all_input_nodes)
    if not isinstance(value, torch.Tensor) or _compat.has_symbolic_shape(value):
        return False
    return value.is_contiguous()


def divide(graph: fx.Graph, launch: fx.Node, share: float) -> tuple[list[fx.Node], list[fx.Node]]:
    """Send what a launch sends by two, of which the second has about `share` of it.

    Args:
        launch: an all-reduce with one wait, of at least 128 bytes.

    Returns:
        The two launches, and what stands in place of the wait, in order.

    >>> from graphopt.comm import get_all_comm_blocks
    >>> from graphopt.schedule import divide
    >>> launches, received = divide(gm.graph, get_all_comm_blocks(gm)[0].comm_node, 0.5)
    >>> len(launches), len(received)
    (2, 4)
    """
    (wait,) = launch.users
    sent: Any = launch.args[0]
    value = fake_value(sent)
    step = ALIGNMENT_BYTES // value.element_size()
    behind = round(share * value.numel() / step) * step
    behind = min(max(behind, step), value.numel() - step)
    sizes = [value.numel() - behind, behind]
    with graph.inserting_before(launch):
        flat = communicating(graph, aten.view.default, (sent, [value.numel()]), launch)
        split = communicating(graph, aten.split_with_sizes_copy.default, (flat, sizes), launch)
        parts = [communicating(graph, operator.getitem, (split, index), launch) for index in (0, 1)]
        launches = [
            communicating(graph, launch.target, (part, *launch.args[1:]), launch) for part in parts
        ]
    with graph.inserting_before(wait):
        waits = [communicating(graph, wait.target, (each,), wait) for each in launches]
        joined = communicating(graph, aten.cat.default, (waits,), wait)
        whole = communicating(graph, aten.view.default, (joined, list(value.shape)), wait)
    for node in (*launches, *waits):
        set_sent_names(node, sent_names(launch))
    wait.replace_all_uses_with(whole)
    graph.erase_node(wait)
    graph.erase_node(launch)
    return launches, [*waits, joined, whole]
