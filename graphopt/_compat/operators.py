"""Facts about operators: their flop formulas, and whether they functionalize themselves."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.fx import has_side_effect

schema_of: attrgetter[Any] = attrgetter("_schema")
"""The schema of an operator (an `OpOverload`): its name, arguments and results."""

operator_name: attrgetter[str] = attrgetter("_schema.name")
"""The name of an operator without its overload, such as "aten::add"."""

overload_name: attrgetter[str] = attrgetter("_overloadname")
"""The overload of an operator, such as "Tensor" or "default"."""

for _assertion in (
    torch.ops.aten._assert_async.default,  # torch keeps `_assert_async.msg` alone
    torch.ops.aten._functional_assert_async.msg,
    torch.ops.aten._functional_assert_scalar.default,
    torch.ops.aten._linalg_check_errors.default,  # torch keeps it from 2.13 on
):
    has_side_effect(_assertion)


def flop_formula(target: Any) -> Callable[..., int] | None:
    """The formula of torch's flop counter for an operator, given its arguments and its result as
    `out_val`."""
    from torch.utils.flop_counter import flop_registry

    packet = target.overloadpacket if isinstance(target, OpOverload) else None
    return None if packet is None else flop_registry.get(packet)


def has_functionalization(target: Any) -> bool:
    """True if an operator has its own functionalization rule."""
    key: Any = getattr(torch._C.DispatchKey, "Functionalize")  # noqa: B009 - not in the stubs
    return key in target.py_kernels or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
    )
