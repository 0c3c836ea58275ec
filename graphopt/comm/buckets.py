"""Buckets of all-reduces: which become one collective, and which nodes must move behind it.

Decided from the order of the graph alone, in one walk: near-linear, and the same on every rank
whose collectives have the same order, sizes and kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.comm.blocks import CommBlock, get_all_comm_blocks, late_nodes
from graphopt.graph_utils import (
    after_placeholders,
    call_function_with_meta,
    is_collective,
    is_operator,
    is_random,
    written,
)
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import fake_value, is_launch_kept, known_value, set_phase
from graphopt.ir.operators import argument, calls_of, writers

ALIGNMENT_BYTES = 64
"""The alignment of a bucket's members in bytes."""

BESIDE = 4
"""A bucket stays open while large gradients of this multiple of its limit are sent alone."""

WORTH_A_COPY = 2**22
"""The size in bytes up to which a large gradient is copied into the bucket before that closes,
since another collective would take longer."""


def communicating(
    graph: fx.Graph,
    target: Callable[..., Any] | str,
    args: tuple[Any, ...],
    like: fx.Node,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Inserts a call that belongs to a collective, with metadata like that of `like`."""
    assert callable(target)
    node = call_function_with_meta(graph, target, args, kwargs, like=like)
    set_phase(node, "communication")
    return node


def fusable_blocks(gm: fx.GraphModule, kind: str = "all_reduce") -> dict[fx.Node, CommBlock]:
    """Returns the collectives of a kind that can be fused at all, by launch."""
    pinned = pinned_nodes(gm.graph)
    blocks = get_all_comm_blocks(gm, kind)
    return {block.comm_node: block for block in blocks if not why_not_fusable(block, pinned)}


def pinned_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns late nodes and their destinations, which must stay in place."""
    late = late_nodes(graph)
    return {*late, *late.values()}


def why_not_fusable(block: CommBlock, pinned: set[fx.Node]) -> str | None:
    """Returns why a collective can join no bucket, or None if it can."""
    values = [known_value(node) for node in (*block.inputs, *block.wait_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(map(_compat.has_symbolic_shape, tensors)):
        return "the size of what is sent depends on values or changes"
    if len(tensors) < len(values) or not all(tensor.is_contiguous() for tensor in tensors):
        return "what is sent is not contiguous"
    if not block.nbytes:
        return "what is sent is empty"
    if is_launch_kept(block.comm_node):
        return "other ranks may launch it in a graph of another branch"
    users = block.users
    if any(user in pinned for user in (*block.node_list, *users)):
        return "it is waited for one iteration late, or what is late runs before it"
    if any(map(_has_absolute_offset, (*block.tail, *users))):
        return "the result is read through as_strided"
    if len(values) != 2 or list(block.comm_node.users) != block.wait_nodes:
        return "it sends several tensors, or others than its wait read its launch"
    return None


def _has_absolute_offset(node: fx.Node) -> bool:
    """True if a node reads at an offset counted from the beginning of a storage."""
    target = node.target
    return isinstance(target, _compat.OpOverload) and "as_strided" in _compat.operator_name(target)


def raise_launches(
    graph: fx.Graph, fusable: Mapping[fx.Node, CommBlock], effects: Effects
) -> set[fx.Node]:
    """Moves each launch up to the value it sends, in the order of its group. Returns those that
    moved."""
    updated = {effects.key(state) for node in writers(graph) for state in written(node)}
    moved: set[fx.Node] = set()
    for node, anchor in _with_anchors(graph, fusable):
        if anchor.next is not node and effects.key(node.all_input_nodes[0]) not in updated:
            anchor.append(node)
            moved.add(node)
    return moved


def may_change(
    fusable: Mapping[fx.Node, CommBlock], graph: fx.Graph, limits: tuple[int, int]
) -> bool:
    """True if some launch could move up, or some bucket get two members, ignoring all other nodes:
    a necessary condition for any change."""
    if any(anchor.next is not node for node, anchor in _with_anchors(graph, fusable)):
        return True
    return bool(BucketPlanner(fusable, None, set(), limits).of_sizes_alone())


def _with_anchors(
    graph: fx.Graph, fusable: Mapping[fx.Node, CommBlock]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields each fusable launch with the node behind which it may move: its input, or the previous
    launch of its group."""
    previous: dict[Any, fx.Node] = {}
    for node in calls_of(graph, attrgetter("collective")):
        group = argument(node, "group_name")
        if node in fusable:
            sent, before = node.all_input_nodes[0], previous.get(group)
            yield node, after_placeholders(sent if before is None else max(sent, before))
        previous[group] = node


@dataclass
class ScaledOperand:
    """The operand of an all-reduce that sends it times a constant, possibly reshaped.

    Attributes:
        tensor: the tensor factor of the product.
        factor: the constant factor.
        views: the views between the product and the sent value.
    """

    tensor: fx.Node
    factor: float
    views: list[fx.Node]


def scaled_input(sent: fx.Node) -> ScaledOperand | None:
    """Returns the scaled operand of a sent value. None if the product has other readers or scaling
    later would need a copy."""
    views: list[fx.Node] = []
    product = sent
    while is_operator(product.target, "aten::view", "aten::permute") and len(product.users) == 1:
        views.append(product)
        product = product.all_input_nodes[0]
    if not is_operator(product.target, "aten::mul") or len(product.users) != 1:
        return None
    tensor, factor = product.args
    if not isinstance(tensor, fx.Node) or not isinstance(factor, float):
        return None
    value, scaled = fake_value(tensor), fake_value(product)
    same = (value.shape, value.dtype) == (scaled.shape, scaled.dtype)
    if not same or (value.stride() != scaled.stride() and (views or not scaled.is_contiguous())):
        return None
    return ScaledOperand(tensor, factor, views[::-1])


@dataclass(eq=False)
class Bucket:
    """All-reduces that become one.

    Attributes:
        limit: size in bytes at which the bucket closes.
        blocks: the members in launch order.
        nbytes: the size of all members in bytes.
        sent: storages that the fused launch will read.
        behind: nodes after the first member that must stand after the fused wait.
        read, updated: storages that these nodes read and write.
        draws: True if one of these nodes draws random numbers.
        is_open: True if it takes more members.
    """

    limit: int
    blocks: list[CommBlock] = field(default_factory=list)
    nbytes: int = 0
    sent: set[object] = field(default_factory=set)
    behind: list[fx.Node] = field(default_factory=list)
    read: set[object] = field(default_factory=set)
    updated: set[object] = field(default_factory=set)
    draws: bool = False
    is_open: bool = True


class BucketPlanner:
    """Sorts all-reduces into buckets, in one walk over the graph.

    Every node is known to stand *behind* the open buckets whose results it needs, or which hold a
    node that it must not overtake: one that reads what it writes, writes what it reads or writes,
    or draws random numbers as it does. A collective behind an open bucket closes it. So a bucket
    depends only on buckets whose last member comes before its own, and there are no cycles.
    """

    def __init__(
        self,
        fusable: Mapping[fx.Node, CommBlock],
        effects: Effects | None,
        pinned: set[fx.Node],
        limits: tuple[int, int],
    ) -> None:
        self._fusable = fusable
        self._key: Callable[[fx.Node], object] = str if effects is None else effects.key
        self._pinned = pinned
        self._first_limit, self._limit = limits
        self._open: dict[Any, Bucket] = {}
        self._alone: dict[Any, int] = {}
        self._closed: list[Bucket] = []
        self._behind: dict[fx.Node, list[Bucket]] = {}

    def plan(self, graph: fx.Graph) -> list[Bucket]:
        """Returns the buckets of at least two members."""
        left = len(self._fusable)
        for node in graph.nodes:
            if not left:
                break
            behind = self._buckets_before(node)
            if is_collective(node) or node in self._pinned:
                self._close(behind)
            elif behind:
                self._delay(node, behind)
            self._close_if_overwritten(node)
            if node in self._fusable:
                self._add(self._fusable[node])
                left -= 1
        return self._several()

    def of_sizes_alone(self) -> list[Bucket]:
        """Returns the buckets as `plan` would if no node had to move behind a bucket."""
        for block in self._fusable.values():
            self._add(block)
        return self._several()

    def _several(self) -> list[Bucket]:
        self._close(list(self._open.values()))
        return [bucket for bucket in self._closed if len(bucket.blocks) > 1]

    def _add(self, block: CommBlock) -> None:
        key = (block.group, block.reduce_op, block.dtype, block.device)
        if block.nbytes >= self._limit and not self._joins(key, block.nbytes):
            return  # alone: sent as it is, nobody copies it into a bucket
        bucket = self._open.get(key)
        if bucket is None or not bucket.is_open:
            bucket = Bucket(self._first_limit if bucket is None else self._limit)
            self._open[key] = bucket
        scaled = scaled_input(block.inputs[0])
        bucket.blocks.append(block)
        bucket.nbytes += block.nbytes
        bucket.sent.add(self._key(block.inputs[0]))
        if scaled is not None:
            bucket.sent.add(self._key(scaled.tensor))
        self._behind[block.comm_node] = [bucket]
        if bucket.nbytes >= bucket.limit:
            self._close([bucket])

    def _joins(self, key: Any, nbytes: int) -> bool:
        """True if a gradient above the size limit joins the open bucket. That closes each time a
        few times the limit in large gradients has passed."""
        before = self._alone.get(key, 0)
        self._alone[key] = before + nbytes
        span = BESIDE * self._limit
        bucket = self._open.get(key)
        if bucket is None or not bucket.is_open or before // span == self._alone[key] // span:
            return False
        if nbytes <= WORTH_A_COPY:
            return True
        self._close([bucket])
        return False

    def _close(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.is_open:
                bucket.is_open = False
                self._closed.append(bucket)

    def _buckets_before(self, node: fx.Node) -> list[Bucket]:
        """Returns the open buckets that `node` must stand behind."""
        needed = [b for source in node.all_input_nodes for b in self._behind.get(source, ())]
        found = dict.fromkeys(bucket for bucket in needed if bucket.is_open)
        for bucket in self._open.values():
            if bucket.is_open and bucket.behind and self._may_not_overtake(node, bucket):
                found[bucket] = None
        return list(found)

    def _may_not_overtake(self, node: fx.Node, bucket: Bucket) -> bool:
        if bucket.draws and is_random(node):
            return True
        read, updated = self._accesses(node)
        return not (
            updated.isdisjoint(bucket.read)
            and updated.isdisjoint(bucket.updated)
            and read.isdisjoint(bucket.updated)
        )

    def _accesses(self, node: fx.Node) -> tuple[set[object], set[object]]:
        read = {self._key(source) for source in node.all_input_nodes}
        return read, {self._key(state) for state in written(node)}

    def _delay(self, node: fx.Node, buckets: list[Bucket]) -> None:
        self._behind[node] = buckets
        read, updated = self._accesses(node)
        for bucket in buckets:
            bucket.behind.append(node)
            bucket.read |= read
            bucket.updated |= updated
            bucket.draws |= is_random(node)

    def _close_if_overwritten(self, node: fx.Node) -> None:
        """Closes the buckets with a member whose sent value `node` overwrites."""
        updated = {self._key(state) for state in written(node)}
        if updated:
            behind = self._behind.get(node, ())
            buckets = [b for b in self._open.values() if b not in behind]
            self._close([b for b in buckets if not updated.isdisjoint(b.sent)])
