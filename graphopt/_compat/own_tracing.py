"""Suspends graphopt's Python tracing function while torch's and its own code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = frozenset({"aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd"})

T = TypeVar("T")


class OwnTracer:
    """graphopt's tracing function (`sys.settrace`).

    Attributes:
        alone: nobody else traces along, who would want to see everything.
    """

    alone: bool


without_overrides: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""While active, tensor subclasses and function modes are bypassed."""


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)`, which runs no user code, without the tracing function."""
    tracer = sys.gettrace()
    if not (isinstance(tracer, OwnTracer) and tracer.alone):
        return function(*args)
    sys.settrace(None)
    try:
        return function(*args)
    finally:
        sys.settrace(tracer)


_FAKE = frozenset({FakeTensor})
_DEVICE = torch.ops.prim.device.default


@lru_cache(maxsize=4096)
def _is_own(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace in _NAMESPACES


class UntracedOperators(TorchDispatchMode):
    """While active, torch's operators run without the tracing function.

    What records such an operator is a thousand lines of torch's Python, of which each would be
    slower by what `sys.settrace` costs. Operators of others may run their code, and so may tensors
    of a class of theirs: the tracing function goes on there. Calling the operator again also shows
    it to modes that see torch functions where nothing did before, as in `torch.Tensor([1.0])`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Always True: torch itself need not see the mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # which autograd asks for again and again
        if _is_own(func) and _FAKE.issuperset(types):
            return untraced(partial(func, *args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))
