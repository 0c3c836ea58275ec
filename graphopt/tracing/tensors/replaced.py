"""Module tensors that a step replaces by other objects: `self.average = new`.

Each call puts another tensor into an attribute, or in the place of a buffer; whoever has the former
one keeps it. Other ranks would have to do the same, and a parameter is what optimizers update: a
buffer that is replaced on several ranks, and a parameter that is replaced anywhere, are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Any

from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.tracing.inputs.entries import Inputs, ModuleTensor
from graphopt.tracing.inputs.implicit import ImplicitInputFinder
from graphopt.tracing.outside.places import OutsidePlace
from graphopt.tracing.outside.record import OutsideRecord
from graphopt.tracing.rollback.substitute import StandIns


class ReplacedTensors:
    """Finds them when the step is over.

    Args:
        modules: of the step.
        known: places, by their identities, whose buffers are known to be replaced.
        alone: no other rank runs the same step.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        known: Set[Hashable],
        record: OutsideRecord,
        finder: ImplicitInputFinder,
        alone: bool,
    ) -> None:
        self._known, self._record, self._finder, self._alone = known, record, finder, alone
        self._attributes = {id(vars(module)) for module in modules}
        self._holders = {id(_compat.own_parameters(each)): vars(each) for each in modules}
        self._buffers = {id(_compat.own_buffers(module)) for module in modules}

    def finish(self, inputs: Inputs, traced: StandIns) -> None:
        """Makes replaced buffers inputs that may be another tensor in each call.

        Raises:
            CaptureError: a tensor is replaced that has to stay.
        """
        for entry in inputs.module_tensors:
            stand_in = traced.by_id[id(entry.tensor)]
            for owner, key in entry.slots:
                value = owner.get(key)
                if value is stand_in or entry.rebindable or self._is_put(owner, key):
                    continue
                if entry.kind == "parameter":
                    raise self._replaced_parameter(entry, owner)
                if not self._alone:
                    raise CaptureError(
                        f"it replaces {entry.fqn}, which other ranks have as well, by another"
                        " object",
                        hint="update it in place: with torch.no_grad(): buffer.copy_(new)",
                    )
                owner[key] = stand_in  # for this trace; the next one has the place as an input

    def _replaced_parameter(self, entry: ModuleTensor, owner: Any) -> CaptureError:
        """Builds the error for a step that replaces a parameter."""
        written = self._record.unrepeated.written_at(self._holders.get(id(owner)))
        return CaptureError(
            f"it replaces the parameter {entry.fqn} by another object",
            location=None if written is None else str(written[1]),
            hint="update it in place: with torch.no_grad(): parameter.copy_(new)",
        )

    def _is_put(self, owner: Any, key: str) -> bool:
        """True if each call stores another tensor in a place: an attribute, or a buffer that is an
        input already."""
        if not self._alone:
            return False
        if id(owner) in self._attributes:
            return True
        identity = OutsidePlace("item", owner, key).identity
        if id(owner) in self._buffers and identity not in self._known:
            self._finder.found.replaced |= {identity}
            return False
        return id(owner) in self._buffers
