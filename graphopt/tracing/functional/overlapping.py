"""Refusal of operators that write to memory of which they also read other parts.

    a[:, :-1] = a[:, 1:]      eager moves the columns one by one: what is read is not written yet
    a[:, 1:] = a[:, :-1]      eager writes the first column into all others
    a.add_(a.t())             eager refuses it

A graph reads all before it writes. Whether eager does as well depends on the order in which its
kernel goes, so the operator is tried: on tensors that lie in memory as those of the step do, and on
copies of what it reads.
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

_MANY = 1 << 28
"""The most bytes of memory with which an operator is tried."""

_UNTRIED = "where eager code may see what it has written already"


def refuse_overlapping(node: fx.Node) -> None:
    """Refuses an operator that writes to part of what it reads, if eager code refuses it or
    computes another result than on copies.

    Raises:
        CaptureError: naming the line.
    """
    changed = [known_value(each) for each in written(node)]
    if not changed or not _overlap(changed, map(known_value, node.all_input_nodes)):
        return
    reason = _tried(node)
    if reason is not None:
        raise CaptureError(
            f"it writes to a tensor of which it reads another part ({node.target}), {reason}",
            location=source_line(node),
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


def _tried(node: fx.Node) -> str | None:
    """Describes how eager code differs from a graph in a test run, or returns None."""
    values = {each: known_value(each) for each in node.all_input_nodes}
    sizes = {
        _compat.storage_key(value): value.untyped_storage().nbytes()
        for value in values.values()
        if _has_memory(value)
    }
    if not all(isinstance(each, int) for each in sizes.values()) or sum(sizes.values()) > _MANY:
        return _UNTRIED
    with _compat.without_modes(), torch.no_grad():
        as_they_lie, apart = _SampleMemory(sizes), _SampleMemory(sizes)
        changed = set(written(node))
        lying = {each: as_they_lie.tensor(value) for each, value in values.items()}
        copied = {
            each: apart.tensor(value) if each in changed else _clone(apart.tensor(value))
            for each, value in values.items()
        }
        try:
            _run(node, copied)
        except Exception:  # not for these numbers, or not on this device
            return _UNTRIED
        try:
            _run(node, lying)
        except RuntimeError as error:
            return f"which eager code refuses: {str(error).strip().split(chr(10), 1)[0]}"
        if not all(torch.equal(lying[each], copied[each]) for each in changed):
            return "and eager code reads there what it has written before"
    return None


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    node.target(*args, **kwargs)  # type: ignore[operator]


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _SampleMemory:
    """Storages of the same sizes as the step's, filled with reproducible numbers."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, value: Any) -> Any:
        """Returns the test tensor for a value of the step."""
        if not _has_memory(value):
            return value
        key = _compat.storage_key(value)
        if key not in self._storages:
            self._storages[key] = _numbers(value.dtype, self._sizes[key]).untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(self._storages[key], value.storage_offset(), value.shape, value.stride())


def _numbers(dtype: torch.dtype, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    count = -(-size // torch.empty(0, dtype=dtype).element_size())
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(count, generator=generator).to(dtype)
    return torch.randint(2, (count,), generator=generator).to(dtype)
