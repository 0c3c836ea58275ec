"""A buffer in whose place a module puts another one: `self.average = new`.

Eager code goes on with a new object, and whoever has the old one keeps it. In the graph this is an
update of the buffer, which is the same as long as nobody sees the difference: the step neither
reaches nor leaves the old one elsewhere, and nothing shares the memory of the new one. A parameter
that is replaced is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.entries import Inputs, ModuleTensor
from graphopt.tracing.inputs.implicit import Finder
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import Record
from graphopt.tracing.substitute import Traced


class Replacing:
    """Takes new buffers for updates of the old ones.

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
        self._holders = {id(_compat.own_parameters(each)): vars(each) for each in modules}
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
                    raise self._replaced_parameter(entry, owner)
                self._update_buffer(entry, stand_in, value)
                owner[key] = stand_in

    def _replaced_parameter(self, entry: ModuleTensor, owner: Any) -> CaptureError:
        """The refusal of a step that puts another parameter in the place of one."""
        written = self._record.unrepeated.written_at(self._holders.get(id(owner)))
        return CaptureError(
            f"it replaces the parameter {entry.fqn} by another object",
            location=None if written is None else str(written[1]),
            hint="update it in place: with torch.no_grad(): parameter.copy_(new)",
        )

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

    def _update_buffer(self, entry: ModuleTensor, old: torch.Tensor, new: object) -> None:
        """Let `old`, which stands for a buffer, be what `new` is.

        Raises:
            CaptureError: it is of another kind, or somebody sees that it is another object in
                eager code.
        """
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
