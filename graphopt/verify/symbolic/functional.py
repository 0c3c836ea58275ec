"""In-place operators and their functional forms."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir import inplace

_OURS = {written: functional for functional, written in inplace.INPLACE.items()}


@cache
def functional_form(target: Any) -> Any | None:
    """Returns the operator that returns what an in-place one writes, with the same arguments, or
    None."""
    namespace, name = _compat.operator_name(target).split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return _OURS.get(target)
    wanted = _types(target)
    for overload in packet.overloads():
        candidate: _compat.OpOverload = getattr(packet, overload)
        if not _compat.schema_of(candidate).is_mutable and _types(candidate) == wanted:
            return candidate
    return _OURS.get(target)


def functional_form_for(target: Any, written: torch.Tensor) -> Any | None:
    """Returns the functional form for this tensor. None for dtypes and strides where its bits
    differ."""
    ours = _OURS.get(target)
    if ours is None or inplace.torch_gives_the_same(target, written):
        return functional_form(target)
    return ours


def is_standard(target: Any, value: Any) -> bool:
    """True if a call that gives `value` gives the bits of the `standard_form` of its target."""
    written = inplace.INPLACE.get(target)
    return written is None or (
        isinstance(value, torch.Tensor) and inplace.torch_gives_the_same(written, value)
    )


@cache
def standard_form(target: Any) -> Any:
    """Returns one representative of all functional operators that equal the same in-place
    operator."""
    written = inplace.INPLACE.get(target)
    if written is None or written in inplace.ROUNDING:
        return target
    return functional_form(written) or target


def _types(target: Any) -> list[str]:
    return [f"{argument.name} {argument.type}" for argument in _compat.schema_of(target).arguments]
