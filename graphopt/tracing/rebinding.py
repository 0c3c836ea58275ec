"""`parameter.data = new`: the parameter gets other storage, and whoever has the old one keeps it.

While a step is traced, the stand-in of the parameter gets the storage of `new` as the parameter
does in eager code: a name for the same memory, written and read through either. When the step is
over, what the parameter has become is copied into what the graph takes for it:

    p.add_(e)                 memory of the input
    p.data = old              memory of `old`, from here on
    p.sub_(g)
    ─────── the end ───────   left = clone(input);  input.copy_(p)

Before a call the parameter is moved to storage of its own if somebody else has its storage, who
finds `left` there afterwards: what the step has written to it, where it has.
"""

from __future__ import annotations

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
        rebound: module tensors that end in other storage, by position, with what they leave in the
            storage that they had.
        left_storages: which that is (`storage_key` of stand-ins).
    """

    def __init__(self, inputs: Inputs, traced: Traced) -> None:
        alone = {id(h) for h in inputs.placeholders if not isinstance(h, Storage)}
        self._positions = {
            id(traced.by_id[id(entry.tensor)]): index
            for index, entry in enumerate(inputs.module_tensors)
            if id(entry) in alone and not entry.rebindable
        }
        self._tracer = _compat.current_tracer()
        self._storages = {_compat.storage_key(tensor) for tensor in traced.by_id.values()}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rebound: dict[int, torch.Tensor] = {}
        self.left_storages: set[int] = set()

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
        known = _compat.node_of(self._tracer, new) is not None
        if _compat.base_of(new) is not None or not known or not _is_whole(new):
            raise _refusal("it lets a tensor be a part of another one (`.data = …`)")
        if position not in self._before:
            with torch.no_grad():
                self._before[position] = target, target.detach()
        _compat.rebind(self._tracer, target, new)

    def finish(self) -> None:
        """The step is over.

        Raises:
            CaptureError: a parameter ends in storage that another tensor of the model has.
        """
        taken = set(self._storages)
        for position, (target, before) in self._before.items():
            if _compat.storage_key(target) == _compat.storage_key(before):
                continue  # it has its own again
            if _compat.storage_key(target) in taken:
                raise _refusal("it lets two tensors share storage (`.data = …`)")
            taken.add(_compat.storage_key(target))
            self.left_storages.add(_compat.storage_key(before))
            with torch.no_grad(), _compat.version_kept(before):
                self.rebound[position] = before.clone()
                before.copy_(target)


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


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage: kernels go by where a tensor begins."""
    return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or _compat.storage_key(a) != _compat.storage_key(b):
        return False
    return _alike(a, b) and bool(a.storage_offset() == b.storage_offset())
