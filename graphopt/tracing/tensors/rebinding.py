"""`tensor.data = new` in a trace: the tensor gets other storage, and aliases keep the old one.

While a step is traced, the stand-in of the parameter gets the storage of `new` as the parameter
does in eager code: a name for the same memory, written and read through either. When the step is
over, what the parameter has become is copied into what the graph takes for it:

    p.add_(e)                 memory of the input
    p.data = old              memory of `old`, from here on
    p.sub_(g)
    ─────── the end ───────   left = clone(input);  input.copy_(p)

Before a call the parameter is moved to storage of its own if somebody else has its storage, who
finds `left` there afterwards: what the step has written to it, where it has.

A gradient that the step has found, and an argument, get the storage of `new` after every call, by
the same assignment. What the step has computed itself is nothing but a name for `new` from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.ir.user_frames import current_location
from graphopt.tracing.inputs.entries import Inputs, Storage
from graphopt.tracing.rollback.substitute import StandIns


class Rebinding:
    """The assignments to `.data` in one trace.

    Attributes:
        rebound: module tensors that end in other storage, by position, with what they leave in the
            storage that they had.
        left_storages: which that is (`storage_key` of stand-ins).
        given: gradients and arguments that end in other storage, by their placeholder.
    """

    def __init__(self, leaves: Sequence[Any], inputs: Inputs, traced: StandIns) -> None:
        alone = {id(h) for h in inputs.placeholders if not isinstance(h, Storage)}
        self._positions = {
            id(traced.by_id[id(entry.tensor)]): index
            for index, entry in enumerate(inputs.module_tensors)
            if id(entry) in alone
        }
        self._given = dict(_given(leaves, inputs, traced))
        self._inputs = set(map(id, [*traced.by_id.values(), *traced.gradients.values()]))
        self._tracer = _compat.current_tracer()
        self._storages = {_compat.storage_key(tensor) for tensor in traced.by_id.values()}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rebound: dict[int, torch.Tensor] = {}
        self.left_storages: set[int] = set()
        self.given: dict[int, torch.Tensor] = {}

    def set(self, target: torch.Tensor, new: Any) -> None:
        """Traces `target.data = new`.

        Raises:
            CaptureError: that is no update of a tensor.
        """
        if isinstance(new, torch.Tensor) and _same_memory(target, new):
            return  # `p.data -= x` ends with this
        if not isinstance(new, torch.Tensor) or _compat.node_of(self._tracer, new) is None:
            raise _refusal(_OTHER_STORAGE)
        if id(target) not in self._inputs:
            if not _is_like(target, new):
                raise _refusal(_OTHER_STORAGE)
            _compat.rebind(self._tracer, target, new)
            return
        if not _alike(target, new):
            raise _refusal(_OTHER_STORAGE)
        if _compat.base_of(new) is not None or not _is_whole(new):
            raise _refusal("it lets a tensor be a part of another one (`.data = …`)")
        self._note(target)
        with torch.no_grad():  # the target has its own history, or none
            _compat.rebind(self._tracer, target, new.detach() if new.requires_grad else new)

    def grown(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Traces `tensor.resize_(sizes)` of a new empty tensor, which gets storage of unknown
        values. None for other calls.

        Raises:
            CaptureError: an input gets another shape.
        """
        if func in _SHAPING and id(args[0]) in self._inputs:
            return _in_shape(func, args, kwargs)
        if func not in _RESIZING or kwargs or not isinstance(args[0], torch.Tensor):
            return None
        target: torch.Tensor = args[0]
        sizes = list(args[1:])
        if target.numel() or target.requires_grad or id(target) in self._inputs:
            return None
        if _compat.node_of(self._tracer, target) is None:
            return None
        shape = sizes[0].shape if func is torch.Tensor.resize_as_ else torch.Size(_flat(sizes))
        if not shape.numel():
            return None
        _compat.rebind(self._tracer, target, target.new_empty(shape))
        return target

    def _note(self, target: torch.Tensor) -> None:
        """Records that an input's `.data` gets other storage."""
        if id(target) in self._given:
            self.given[self._given[id(target)]] = target
            return
        position = self._positions.get(id(target))
        if position is None:
            raise _refusal(_OTHER_STORAGE)
        if position not in self._before:
            with torch.no_grad():
                self._before[position] = target, target.detach()

    def finish(self) -> None:
        """Ends the trace, and refuses parameters that end in another tensor's storage.

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


_OTHER_STORAGE = "it gives a tensor other storage (`.data = …`)"


_RESIZING = (torch.Tensor.resize_, torch.Tensor.resize_as_)

_VIEWS: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
}
_SHAPING = frozenset({*_VIEWS, *_RESIZING})


def _in_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The input itself, if `resize_` asks for the shape that it has.

    Raises:
        CaptureError: it has another one.
    """
    target: torch.Tensor = args[0]
    sizes = list(args[1:])
    with torch.no_grad():
        if func in _VIEWS:
            view = _VIEWS[func](*args, **kwargs)
            same = view.shape == target.shape and view.stride() == target.stride()
        elif func is torch.Tensor.resize_as_:
            same = sizes[0].shape == target.shape
        else:
            same = torch.Size(_flat(sizes)) == target.shape
    if not same:
        name = func.__name__
        raise CaptureError(
            f"it changes the shape or strides of an input in place ({name})",
            location=current_location(),
            hint=f"use the operator that gives a new tensor: x = x.{name.rstrip('_')}(…), or for a"
            " tensor that is resized, x = source.clone(); or do it outside the step",
        )
    return target


def _flat(sizes: list[Any]) -> Any:
    """Sizes as one tuple, given one by one or as a sequence."""
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes


def _given(leaves: Sequence[Any], inputs: Inputs, traced: StandIns) -> Iterator[tuple[int, int]]:
    """The stand-ins of gradients and arguments that share storage with no other input, by id,
    with their placeholder numbers."""
    stand_ins = {id(tensor): tensor for tensor in traced.by_id.values()}
    stand_ins.update((id(tensor), tensor) for tensor in traced.gradients.values())
    shared = Counter(map(_compat.storage_key, stand_ins.values()))
    first = len(inputs.placeholders) + len(inputs.states)
    for number, gradient in enumerate(inputs.gradients, first):
        yield id(traced.gradients[id(gradient.owner)]), number
    first += len(inputs.gradients)
    for number, position in enumerate(inputs.argument_gradients, first):
        yield id(traced.by_id[id(leaves[position].grad)]), number
    first += len(inputs.argument_gradients) + len(inputs.hyperparameters)
    for number, position in enumerate(inputs.user, first):
        stand_in = traced.by_id[id(leaves[position])]
        if shared[_compat.storage_key(stand_in)] == 1:
            yield id(stand_in), number


def _refusal(reason: str) -> CaptureError:
    return CaptureError(
        reason,
        location=current_location(),
        hint="write the new values in place: with torch.no_grad(): parameter.copy_(new)",
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _is_like(a, b) and bool(a.stride() == b.stride())


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if a tensor keeps shape, strides and dtype with the storage of another one."""
    return (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)


def _is_whole(tensor: torch.Tensor) -> bool:
    """True if a tensor is the whole of its storage: kernels depend on the offset."""
    return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or _compat.storage_key(a) != _compat.storage_key(b):
        return False
    return _alike(a, b) and bool(a.storage_offset() == b.storage_offset())
