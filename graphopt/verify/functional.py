"""Operators that work in place, and those that give what they write."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphopt import _compat
from graphopt.ir.operators import rounds_in_place
from graphopt.tracing import inplace

_OURS = {written: functional for functional, written in inplace.INPLACE.items()}


@cache
def functional_form(target: Any) -> Any | None:
    """The operator that returns what an in-place one writes, if there is one with its arguments."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return _OURS.get(target)
    wanted = _types(target)
    for overload in packet.overloads():
        candidate: _compat.OpOverload = getattr(packet, overload)
        if not candidate._schema.is_mutable and _types(candidate) == wanted:
            return candidate
    return _OURS.get(target)


def functional_form_for(target: Any, dtype: torch.dtype) -> Any | None:
    """The same for results of a dtype: for some, the operator of that name rounds otherwise."""
    if rounds_in_place(target, dtype):
        return _OURS.get(target)
    return functional_form(target)


@cache
def standard_form(target: Any) -> Any:
    """One operator for all functional ones that give what the same in-place operator writes."""
    written = inplace.INPLACE.get(target)
    if written is None or written in inplace.ROUNDING:
        return target
    return functional_form(written) or target


def _types(target: Any) -> list[str]:
    return [f"{argument.name} {argument.type}" for argument in target._schema.arguments]
