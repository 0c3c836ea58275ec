"""A tensor divided into several that lie in its memory, and joined again, without a copy.

    captured dialect                                executable dialect
    a, b  = split_with_sizes_copy(whole, …)         a, b  = take_apart(whole, …)
    sums  = all_reduce(a), all_reduce(b)     ==>    sums  = all_reduce_(a), all_reduce_(b)
    again = cat(wait(sums))                         again = put_together(wait(sums))

Nobody reads or writes a tensor that was taken apart, so each part is as good as a tensor of its
own, but for how long its memory lasts. What is put together again is the same memory where that is
so at run time, and a concatenation elsewhere. Nobody writes to it: another step may have handed on
the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.ir.metadata import known_value
from graphopt.ir.operators import is_collective, is_wait

aten = torch.ops.aten

_NAMESPACE = "graphopt_parts"
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define("take_apart(Tensor self, int[] split_sizes, int dim=0) -> Tensor[]")
_library.define("put_together(Tensor[] tensors, int dim=0) -> Tensor")


def _take_apart(whole: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    return list(whole.split_with_sizes(sizes, dim))


def _fake_parts(
    self: torch.Tensor, split_sizes: Sequence[int], dim: int = 0
) -> Sequence[torch.Tensor]:
    return aten.split_with_sizes_copy.default(self, split_sizes, dim)  # type: ignore[no-any-return]


def _put_together(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    if not all(_follows(before, part) for before, part in pairwise(parts)):
        return torch.cat(tuple(parts), dim)
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


def _follows(before: torch.Tensor, part: torch.Tensor) -> bool:
    """True if two are dense vectors, of which one begins in memory where the other ends."""
    if not all(each.dim() == 1 and each.is_contiguous() for each in (before, part)):
        return False
    if part.dtype != before.dtype:
        return False
    if part.storage_offset() != before.storage_offset() + before.numel():
        return False
    return before.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def _fake_whole(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(tuple(tensors), dim)


for _name, _kernel, _rule in (
    ("take_apart", _take_apart, _fake_parts),
    ("put_together", _put_together, _fake_whole),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{_name}", _rule, lib=_library)

TAKE_APART = torch.ops.graphopt_parts.take_apart.default
PUT_TOGETHER = torch.ops.graphopt_parts.put_together.default

_SPLIT, _JOIN = aten.split_with_sizes_copy.default, aten.cat.default
CAPTURED: dict[Any, Any] = {TAKE_APART: _SPLIT, PUT_TOGETHER: _JOIN}
"""What these stand for in the captured dialect."""


def can_be_taken_apart(node: fx.Node) -> bool:
    """True if a node copies parts of a dense vector that are only sent; not whether anybody else
    reads that."""
    if node.target is not _SPLIT:
        return False
    if len(node.args) != 2 or node.kwargs or not all(map(is_flat, node.all_input_nodes)):
        return False
    return all(is_collective(user) for item in node.users for user in item.users)


def can_be_put_together(node: fx.Node) -> bool:
    """True if a node joins vectors that have arrived, each of which it reads once; not whether
    anybody else reads them by another name."""
    if node.target is not _JOIN:
        return False
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], (list, tuple)):
        return False
    parts = node.all_input_nodes
    each_once = list(node.args[0]) == parts
    return each_once and all(
        is_wait(part) and is_flat(part) and len(part.users) == 1 for part in parts
    )


def is_flat(node: fx.Node) -> bool:
    """True if the value of a node is a dense vector of known size."""
    value = known_value(node)
    if not isinstance(value, torch.Tensor) or _compat.has_symbolic_shape(value):
        return False
    return value.dim() == 1 and value.is_contiguous()
