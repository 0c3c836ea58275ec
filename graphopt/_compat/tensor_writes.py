"""Values and sizes that a fake tensor has given, valid until an operator writes to its memory.

Torch keeps what `x.item()` and `x.nonzero()` gave of a fake tensor until its version changes.
Two kinds of operators write without changing it there: those on lists (`_foreach_add_`), of which
only the kernels for values count a version, and fused optimizers, which leave versions alone in
eager code as well. So every write is counted once more, by storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphopt._compat.storages import number_of

_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive")
)
"""Operators of which a fake tensor keeps what they gave."""

_COUNTED_BY_KERNELS = "aten::_foreach_"


def storage_key(tensor: torch.Tensor) -> int:
    """An integer that is equal for tensors over one storage, as long as the storage lives."""
    if tensor.layout is not torch.strided:  # indices and values in storage of their own
        return id(tensor)
    return number_of(torch._C.TensorBase.untyped_storage(tensor))


class WriteCounts:
    """A counter of writes to each storage of a mode's fake tensors."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        # By identity, since what is set on a tensor is what the step has set. A tensor that has the
        # identity of one that is gone has nothing kept yet.
        self._seen: dict[int, int] = {}

    def add(self, tensor: FakeTensor) -> None:
        """Counts a write to the tensor's storage."""
        storage = storage_key(tensor)
        self._counts[storage] = self._counts.get(storage, 0) + 1

    def forget(self, func: Any, args: Any) -> None:
        """Drops the values of an operator's inputs that predate the last write to them."""
        if func not in _KEPT or not self._counts or not isinstance(args[0], FakeTensor):
            return
        tensor: Any = args[0]
        count = self._counts.get(storage_key(tensor), 0)
        if self._seen.get(id(tensor), 0) != count:
            tensor.item_memo = tensor.nonzero_memo = None
            tensor.unique_memo = tensor.unique_consecutive_memo = None
            self._seen[id(tensor)] = count


def count_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Counts the writes of an operator that has run on fake tensors."""
    if not getattr(getattr(func, "_schema", None), "is_mutable", False):
        return
    for tensor in _written(func, args, kwargs):
        if func._schema.name.startswith(_COUNTED_BY_KERNELS):
            torch.autograd.graph.increment_version(tensor)
        writes: WriteCounts | None = getattr(tensor.fake_mode, "writes", None)
        if writes is not None:
            writes.add(tensor)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[FakeTensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[index] if index < len(args) else (kwargs or {}).get(argument.name)
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(tensor, FakeTensor):
                yield tensor
