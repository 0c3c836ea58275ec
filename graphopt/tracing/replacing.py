"""A parameter in whose place a module puts another one: `self.weight = nn.Parameter(new)`.

Eager code goes on with a new object, and whoever has the old one keeps it. In the graph this is an
update of the parameter, which is the same as long as nobody sees the difference: no optimizer holds
the old one, the step neither reaches nor leaves it elsewhere, and nothing shares the memory of the
new one. A buffer that is replaced by a tensor of the same kind is updated as well.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.runtime.collector import frozen_objects_seen
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, ModuleTensor
from graphopt.tracing.inputs.implicit import Finder
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.substitute import Traced


class Replacing:
    """Takes new parameters and buffers for updates of the old ones.

    Args:
        alone: no other rank runs the same step.
    """

    def __init__(
        self,
        call: Call,
        inputs: Inputs,
        traced: Traced,
        record: Record,
        finder: Finder,
        alone: bool,
    ) -> None:
        self._call, self._inputs, self._traced = call, inputs, traced
        self._record, self._finder, self._alone = record, finder, alone
        modules = [module for _, module in call.named_submodules()]
        self._attributes = {id(vars(module)) for module in modules}
        self._buffers = {id(_compat.own_buffers(module)) for module in modules}
        given = {id(tensor): tensor for tensor in traced.by_id.values()}
        places = Counter(map(_compat.storage_key, given.values()))
        self._shared = {memory for memory, count in places.items() if count > 1}
        self._storages = set(places)
        self._replaced: dict[int, tuple[ModuleTensor, int]] = {}

    def finish(self) -> None:
        """Put the old ones back, and update them.

        Raises:
            CaptureError: a new one is no update of the old one.
        """
        for entry in self._inputs.module_tensors:
            stand_in = self._traced.by_id[id(entry.tensor)]
            values = [owner.get(key) for owner, key in entry.slots]
            one_of_them = any(value is not values[0] for value in values)
            if one_of_them and entry.kind != "parameter" and not self._alone:
                raise CaptureError(
                    f"it replaces {entry.fqn} in one of the places where it stands, and not in"
                    " others",
                    hint="update it in place (copy_), or give each place a tensor of its own"
                    " (clone())",
                )
            for (owner, key), value in zip(entry.slots, values, strict=True):
                if value is stand_in or entry.rebindable:
                    continue
                if self._is_put(owner, key):
                    continue
                if entry.kind == "parameter":
                    self._update_parameter(entry, stand_in, value)
                else:
                    self._update_buffer(entry, stand_in, value)
                owner[key] = stand_in

    def _is_put(self, owner: Any, key: str) -> bool:
        """Whether each call puts another tensor into a place, and whoever else has the former one
        keeps it: into an attribute, or, where no other rank has to do so, in the place of a
        buffer."""
        if not self._alone:
            return False
        if id(owner) in self._attributes:
            return True
        identity = OutsidePlace("item", owner, key).identity
        if id(owner) in self._buffers and identity not in self._call.besides.replaced:
            self._finder.found.replaced |= {identity}
            return False
        return id(owner) in self._buffers

    def check_left(self, left: Iterable[torch.Tensor]) -> None:
        """Look at what the step returns and leaves, behind `finish`.

        Args:
            left: all tensors, but those that stand where they did.

        Raises:
            CaptureError: one of them is, or shares memory with, what has been replaced, or is what
                has taken its place.
        """
        if not self._replaced:
            return
        new = {storage: entry for entry, storage in self._replaced.values()}
        for storage in map(_compat.storage_key, left):
            if storage in self._replaced or storage in new:
                entry = new.get(storage) or self._replaced[storage][0]
                which = "what it puts there" if storage in new else "the former one"
                raise CaptureError(
                    f"it replaces {entry.fqn}, and returns or keeps {which}",
                    hint="return or keep a copy (clone()), or update it in place (copy_)",
                )

    def _update_parameter(self, entry: ModuleTensor, old: torch.Tensor, new: object) -> None:
        """Let `old`, which stands for a parameter, be what `new` is, its gradient included.

        Raises:
            CaptureError: somebody would see that it is another object in eager code.
        """
        reason = self._reason(entry, old, new)
        if reason is not None or not isinstance(new, torch.Tensor):
            raise CaptureError(
                f"it replaces {entry.fqn} by another object{reason or ''}",
                hint="update it in place, with the same shape and dtype: with torch.no_grad():"
                " parameter.copy_(new)",
            )
        self._update(entry, old, new)
        old.grad = new.grad

    def _update_buffer(self, entry: ModuleTensor, old: torch.Tensor, new: object) -> None:
        """The same of a buffer, which any of its kind may replace."""
        if not isinstance(new, torch.Tensor) or _kind(new) != _kind(old):
            raise CaptureError(
                f"it replaces the buffer {entry.fqn}, {_said(old)}, by {_said(new)}",
                hint="make it with its shape and dtype before the first step, and update it in"
                " place (copy_)",
            )
        if self._is_elsewhere(entry.tensor):
            raise CaptureError(
                f"it replaces the buffer {entry.fqn}, and uses the old one from elsewhere",
                hint="update it in place (copy_), or give each place a tensor of its own (clone())",
            )
        memory = _compat.storage_key(new)
        former = _compat.storage_key(old)
        if memory != former and (memory in self._storages or former in self._shared):
            raise CaptureError(
                f"it replaces the buffer {entry.fqn}, and either shares memory with another tensor",
                hint="put a copy there (clone()), or update it in place (copy_)",
            )
        self._update(entry, old, new)

    def _update(self, entry: ModuleTensor, old: torch.Tensor, new: torch.Tensor) -> None:
        memory = _compat.storage_key(new)
        self._storages.add(memory)
        self._replaced[_compat.storage_key(old)] = entry, memory
        with torch.no_grad():
            old.copy_(new)

    def _reason(self, entry: ModuleTensor, old: torch.Tensor, new: object) -> str | None:
        if not isinstance(new, torch.Tensor) or not _alike(old, new):
            return ", which is no parameter of the same kind"
        if not self._alone:
            return ", which other ranks do not know of"
        if len(entry.slots) > 1 or _compat.storage_key(old) in self._shared:
            return ", and not everywhere where it is used"
        if _compat.storage_key(new) in self._storages:
            return ", which shares memory with another tensor"
        if any(_compat.hooks_of(entry.tensor)) or any(_compat.hooks_of(new)):
            return ", and one of them has hooks"
        if self._is_elsewhere(entry.tensor):
            return ", and uses the old one from elsewhere"
        if _is_updated((entry.tensor, old)):
            return ", while an optimizer updates the old one"
        return None

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether the step got to a tensor in another way than by its module."""
        given = any(leaf is tensor for leaf in self._call.leaves)
        return given or any(read.value is tensor for read in self._record.reads.values())


def _said(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {list(value.shape)} ({value.dtype})"


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if new.grad_fn is not None or new.layout is not torch.strided:
        return False
    ours, theirs = (
        (*_kind(t), t.stride(), t.requires_grad, isinstance(t, torch.nn.Parameter))
        for t in (old, new)
    )
    return ours == theirs


def _is_updated(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether any optimizer of the program has one of the tensors among its parameters."""
    if not any(_holds(optimizer, tensors) for optimizer in _optimizers()):
        return False
    gc.collect()  # some may be gone
    return any(_holds(optimizer, tensors) for optimizer in _optimizers())


def _optimizers() -> Iterator[Optimizer]:
    """All optimizers of the program, by their classes: a list of all objects would be in the way of
    threads that are making some of them."""
    kinds: list[type] = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    with frozen_objects_seen():
        found = [each for each in gc.get_referrers(*kinds) if issubclass(type(each), Optimizer)]
    yield from found


def _holds(optimizer: Optimizer, tensors: tuple[torch.Tensor, ...]) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(p is tensor for group in groups for p in group["params"] for tensor in tensors)
