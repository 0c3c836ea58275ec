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


def take_replaced(
    modules: Sequence[nn.Module],
    known: Set[Hashable],
    record: OutsideRecord,
    finder: ImplicitInputFinder,
    inputs: Inputs,
    traced: StandIns,
    alone: bool,
) -> None:
    """Makes buffers that the step has replaced inputs that may be another tensor in each call.

    Args:
        modules: of the step.
        known: places, by their identities, whose buffers are known to be replaced.
        alone: no other rank runs the same step.

    Raises:
        CaptureError: a tensor is replaced that has to stay.
    """
    attributes = {id(vars(module)) for module in modules}
    buffers = {id(_compat.own_buffers(module)) for module in modules}

    def is_put(owner: Any, key: str) -> bool:
        """True if each call stores another tensor in a place: an attribute, or a buffer that is an
        input already."""
        if not alone or id(owner) in attributes:
            return alone
        identity = OutsidePlace("item", owner, key).identity
        if id(owner) in buffers and identity not in known:
            finder.found.replaced |= {identity}
        return id(owner) in buffers and identity in known

    for entry in inputs.module_tensors:
        stand_in = traced.by_id[id(entry.tensor)]
        for owner, key in entry.slots:
            if owner.get(key) is stand_in or entry.rebindable or is_put(owner, key):
                continue
            if entry.kind == "parameter":
                raise _replaced_parameter(entry, owner, modules, record)
            if not alone:
                raise CaptureError(
                    f"it replaces {entry.fqn}, which other ranks have as well, by another object",
                    hint="update it in place: with torch.no_grad(): buffer.copy_(new)",
                )
            owner[key] = stand_in  # for this trace; the next one has the place as an input


def _replaced_parameter(
    entry: ModuleTensor, owner: Any, modules: Sequence[nn.Module], record: OutsideRecord
) -> CaptureError:
    """Builds the error for a step that replaces a parameter."""
    holder = next((vars(m) for m in modules if _compat.own_parameters(m) is owner), None)
    written = record.unrepeated.written_at(holder)
    return CaptureError(
        f"it replaces the parameter {entry.fqn} by another object",
        location=written and written[1],
        hint="update it in place: with torch.no_grad(): parameter.copy_(new)",
    )
