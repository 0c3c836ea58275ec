"""Operators, and what torch computes their cost by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload


def flop_formula(target: Any) -> Callable[..., int] | None:
    """What torch's flop counter computes an operator's operations by: takes the operator's
    arguments, and what it gives as `out_val`."""
    from torch.utils.flop_counter import flop_registry

    packet = target.overloadpacket if isinstance(target, OpOverload) else None
    return None if packet is None else flop_registry.get(packet)
