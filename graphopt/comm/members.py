"""The members of a bucket: which part of a collective's message is which gradient."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graphopt.comm.blocks import CommBlock
from graphopt.comm.buckets import scaled_input
from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import fake_value, sent_names
from graphopt.ir.operators import argument
from graphopt.ir.views import view_tail


@dataclass(frozen=True)
class BucketMember:
    """One tensor that a collective sends, alone or with others.

    Attributes:
        parameter: whose gradient it is; None where the graph does not say.
        start, size: its first element in what is sent, and how many there are.
        sent: the node that holds it, flat where it is one of several.
        received: nodes that hold its part of the result and nothing else, in graph order: an item
            of `split_with_sizes` or a slice, and the views after it.

    >>> from graphopt.comm import bucket_members, get_all_comm_blocks
    >>> block = get_all_comm_blocks(gm, "all_reduce")[0]
    >>> [(member.parameter, member.start, member.size) for member in bucket_members(block)]
    [('bias', 0, 2)]
    """

    parameter: str | None
    start: int
    size: int
    sent: fx.Node
    received: tuple[fx.Node, ...]


def bucket_members(block: CommBlock) -> list[BucketMember]:
    """Returns the tensors that a collective sends, in order; padding between them is left out.

    A collective that sends one tensor as it is has one member. What is sent may be a concatenation,
    and that times a constant.

    Args:
        block: of a collective that sends one tensor; one of several tensors has a member for each.

    >>> from graphopt.comm import bucket_members, get_all_comm_blocks
    >>> [len(bucket_members(block)) for block in get_all_comm_blocks(gm, "all_reduce")]
    [1, 1]
    """
    names: list[str | None] = [*sent_names(block.comm_node)]
    parts = list(_parts(block))
    if len(names) != len(parts):
        names = [None] * len(parts)
    return [
        BucketMember(name, start, size, sent, tuple(_received(block, start, size, alone)))
        for name, (start, size, sent, alone) in zip(names, parts, strict=True)
    ]


def _parts(block: CommBlock) -> Iterator[tuple[int, int, fx.Node, fx.Node | None]]:
    """Yields (first element, number of elements, node, wait) of each sent tensor; the wait is None
    unless the tensor is a message of its own."""
    if len(block.inputs) > 1 or len(block.wait_nodes) > 1:
        for sent, wait in zip(block.inputs, block.wait_nodes, strict=True):
            yield 0, fake_value(sent).numel(), sent, wait
        return
    (sent,) = block.inputs
    (wait,) = block.wait_nodes
    scaled = scaled_input(sent)
    joined = sent if scaled is None or scaled.views else scaled.tensor
    if not is_operator(joined.target, "aten::cat"):
        yield 0, fake_value(sent).numel(), sent, wait
        return
    start = 0
    for part in joined.args[0]:  # type: ignore[union-attr]
        assert isinstance(part, fx.Node)
        size = fake_value(part).numel()
        if not is_operator(part.target, "aten::new_zeros", "aten::zeros"):
            yield start, size, part, None
        start += size


def _received(block: CommBlock, start: int, size: int, alone: fx.Node | None) -> list[fx.Node]:
    if alone is not None:
        return sorted(view_tail(alone))
    found: list[fx.Node] = []
    for node in _pieces(block.wait_nodes[0]):
        if _place(node) == (start, size):
            found += view_tail(node)
    return sorted(found)


def _pieces(wait: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes cut out of a received tensor, in one or two steps."""
    for user in wait.users:
        if is_operator(user.target, "aten::split_with_sizes"):
            yield from user.users
        elif is_operator(user.target, "aten::slice"):
            yield user


def _place(node: fx.Node) -> tuple[int, int] | None:
    """Returns the first element and the number of elements of a piece of a flat tensor, or None."""
    size = fake_value(node).numel()
    if node.target is operator.getitem:
        split, index = node.args
        assert isinstance(split, fx.Node) and isinstance(index, int)
        sizes = split.args[1]
        return sum(sizes[:index]), size  # type: ignore[arg-type, index]
    begin = argument(node, "start") or 0
    return (begin, size) if isinstance(begin, int) else None
