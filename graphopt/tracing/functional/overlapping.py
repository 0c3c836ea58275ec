"""Refusal of operators that write to memory of which they also read other parts.

    a[:, 1:] = a[:, :-1]      eager writes the first column into all others
    a.add_(a.t())             eager refuses it

A graph reads all before it writes. Whether eager does as well depends on the order in which its
kernel goes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import written
from graphopt.ir.metadata import known_value, source_line
from graphopt.tracing.layouts.parts_of_storage import overlap


def refuse_overlapping(node: fx.Node) -> None:
    """Refuses an operator that writes to part of what it reads.

    Raises:
        CaptureError: naming the line.
    """
    changed = [known_value(each) for each in written(node)]
    if changed and _overlap(changed, map(known_value, node.all_input_nodes)):
        raise CaptureError(
            f"it writes to a tensor of which it reads another part ({node.target}), where eager"
            " code may see what it has written already",
            location=str(source_line(node)),
            hint="read a copy: tensor.clone()",
        )


def _overlap(changed: list[Any], read: Any) -> bool:
    """True if a written tensor partly overlaps a read one."""
    places: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for each in read:
        if _has_memory(each):
            places[_compat.storage_key(each)].append(each)
    return any(
        _overlaps_in_part(each, other)
        for each in changed
        if _has_memory(each)
        for other in places[_compat.storage_key(each)]
    )


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _overlaps_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    if other is one or _geometry(one) == _geometry(other):
        return False
    return bool(one.numel() and other.numel()) and overlap(one, other)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
