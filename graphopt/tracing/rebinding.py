"""`parameter.data = new`: the parameter gets other storage, and whoever has the old one keeps it.

In the graph this is an update of the parameter. What makes it one:

- before each call the parameter is moved to storage of its own, so that nobody sees the update who
  holds the old storage;
- the step has not written to the old storage before, which whoever holds it would see;
- `new` is nobody else's: as long as the step can still reach it, nothing may write to either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.inputs import Inputs, Storage
from graphopt.tracing.source import current_user_line
from graphopt.tracing.substitute import Traced


class Rebinding:
    """What one trace does with `.data`.

    Attributes:
        rebound: module tensors that have been given other storage, by position.
    """

    def __init__(self, inputs: Inputs, traced: Traced) -> None:
        alone = {id(h) for h in inputs.placeholders if not isinstance(h, Storage)}
        self._positions = {
            id(traced.by_id[id(entry.tensor)]): index
            for index, entry in enumerate(inputs.module_tensors)
            if id(entry) in alone and not entry.rebindable
        }
        self._storages = {_compat.storage_key(tensor) for tensor in traced.by_id.values()}
        self._shared: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._written: set[int] = set()
        self._written_unseen = False  # by a function that torch.func has transformed
        self.rebound: set[int] = set()

    def set(self, target: torch.Tensor, new: Any) -> None:
        """`target.data = new`.

        Raises:
            CaptureError: that is no update of a parameter.
        """
        if isinstance(new, torch.Tensor) and _same_memory(target, new):
            return  # `p.data -= x` ends with this
        position = self._positions.get(id(target))
        if position is None or not isinstance(new, torch.Tensor) or not _alike(target, new):
            raise _refusal("it gives a tensor other storage (`.data = …`)")
        if _compat.storage_key(new) in self._storages or new._base is not None:
            raise _refusal("it lets two tensors share storage (`.data = …`)")
        written = self._written_unseen or _compat.storage_key(target) in self._written
        if written and position not in self.rebound:
            raise _refusal("it updates a tensor, and then gives it other storage (`.data = …`)")
        with torch.no_grad(), _compat.version_kept(target):
            target.copy_(new)
        self.rebound.add(position)
        keys = (_compat.storage_key(target), _compat.storage_key(new))
        self._shared += [(weakref.ref(new), key) for key in keys]

    def check(self, written: Any) -> None:
        """The step writes to these tensors.

        Raises:
            CaptureError: to one that shares storage with another by `.data = …`, in eager code.
        """
        tensors = list(_tensors(written))
        seen = [tensor for tensor in tensors if not _compat.is_transformed(tensor)]
        unseen = len(seen) < len(tensors)
        now = set(map(_compat.storage_key, seen))
        self._written |= now
        self._written_unseen |= unseen
        self._shared = [each for each in self._shared if each[0]() is not None]
        if any(unseen or key in now for _, key in self._shared):
            raise _refusal("it lets two tensors share storage (`.data = …`), and writes to one")

    def finish(self) -> None:
        """The step is over.

        Raises:
            CaptureError: something that it leaves shares storage with a parameter.
        """
        if any(reference() is not None for reference, _ in self._shared):
            raise _refusal("it keeps a tensor that shares storage with another (`.data = …`)")


def _refusal(reason: str) -> CaptureError:
    return CaptureError(
        reason,
        location=str(current_user_line()),
        hint="write the new values in place: with torch.no_grad(): parameter.copy_(new)",
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    return bool(a.stride() == b.stride()) and not b.requires_grad


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or _compat.storage_key(a) != _compat.storage_key(b):
        return False
    return _alike(a, b) and bool(a.storage_offset() == b.storage_offset())


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
