"""Scatters and gathers of sharded values, as nodes of a graph.

    scattered   the windows of all ranks beside one another, * (1 / ranks), exchanged and summed
    gathered    the windows of all ranks, of each what it owns, in the shape of the whole
    part_of     this rank's window of what all ranks have

gloo's reduce-scatter is an all-reduce, which sends twice the bytes: on CPUs ranks exchange their
windows with `all_to_all_single` instead, and each adds what it gets in the order of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from graphopt.ir.metadata import fake_value
from graphopt.ir.rows import RowShards
from graphopt.parallel.markers import Group
from graphopt.parallel.shard_operators import owned, sum_of_ranks, window

aten, functional = torch.ops.aten, torch.ops._c10d_functional

Make = Callable[..., Any]
"""Makes a node that calls an operator; a list of nodes where it gives several tensors."""


def scattered(
    make: Make, gradient: fx.Node, shards: RowShards, group: Group, ranks: int
) -> fx.Node:
    """Inserts a reduce-scatter: this rank's window of a gradient's sum over a group, / `ranks`."""
    windows = windows_of_all(make, flat(make, gradient), shards)
    sent = make(aten.mul.Tensor, windows, 1.0 / ranks)
    return reduced(make, sent, shards.length, group)


def reduced(make: Make, sent: fx.Node, length: int, group: Group) -> fx.Node:
    """Sums over ranks the `length` elements that each sends to this one."""
    if fake_value(sent).device.type != "cpu":
        launched = make(
            functional.reduce_scatter_tensor.default, sent, "sum", group.ranks, group.name
        )
        return cast(fx.Node, make(functional.wait_tensor.default, launched))
    sizes = [length] * group.ranks
    launched = make(functional.all_to_all_single.default, sent, sizes, sizes, group.name)
    received = make(functional.wait_tensor.default, launched)
    return cast(fx.Node, make(sum_of_ranks, received, group.ranks))


def windows_of_all(make: Make, whole: fx.Node, shards: RowShards) -> fx.Node:
    """Concatenates all ranks' windows of a flat tensor."""
    if shards.is_even:
        return whole
    ends = [start + shards.length for start in shards.starts]
    pairs = zip(shards.starts, ends, strict=True)
    cuts = [make(aten.slice.Tensor, whole, 0, a, b) for a, b in pairs]
    return cast(fx.Node, make(aten.cat.default, cuts))


def gathered(make: Make, held: fx.Node, shards: RowShards, group: Group) -> fx.Node:
    """Gathers a whole tensor from the windows that the ranks hold."""
    launched = make(functional.all_gather_into_tensor.default, held, group.ranks, group.name)
    return whole_of(make, make(functional.wait_tensor.default, launched), shards)


def whole_of(make: Make, windows: fx.Node, shards: RowShards) -> fx.Node:
    """Assembles a whole tensor from the concatenated windows of all ranks."""
    if not shards.is_even:
        first = itertools.count(0, shards.length)
        cuts = [
            (start + offset, start + offset + length)
            for start, offset, length in zip(first, shards.offsets, shards.lengths, strict=False)
            if length
        ]
        windows = make(
            aten.cat.default, [make(aten.slice.Tensor, windows, 0, a, b) for a, b in cuts]
        )
    return cast(fx.Node, make(aten.view.default, windows, list(shards.shape)))


def part_of(make: Make, whole: fx.Node, shards: RowShards, group: Group) -> fx.Node:
    """This rank's window of a tensor that all ranks have whole."""
    starts = list(shards.starts)
    return cast(fx.Node, make(window, flat(make, whole), starts, shards.length, group.name))


def owned_part(make: Make, held: fx.Node, shards: RowShards, group: Group) -> fx.Node:
    """The elements of its window that this rank owns, padded to equal length on all ranks."""
    if shards.is_even:
        return held
    size = shards.rows * shards.row
    offsets, lengths = list(shards.offsets), list(shards.lengths)
    return cast(fx.Node, make(owned, held, offsets, lengths, size, group.name))


def flat(make: Make, node: fx.Node) -> fx.Node:
    """Flattens a tensor to one dimension in row-major order."""
    value = fake_value(node)
    if not value.is_contiguous():
        node = make(aten.clone.default, node, memory_format=torch.contiguous_format)
    return node if value.dim() == 1 else cast(fx.Node, make(aten.view.default, node, [-1]))
