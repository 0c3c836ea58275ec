"""Code of torch's and graphopt's own without graphopt's tracing function, which makes it slow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode

_NAMESPACES = frozenset({"aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd"})

T = TypeVar("T")


class OwnTracer:
    """A tracing function (`sys.settrace`) of graphopt's.

    Attributes:
        alone: nobody else traces along, who would want to see everything.
    """

    alone: bool


def without_overrides() -> AbstractContextManager[Any]:
    """While active, neither tensor subclasses nor function modes see what is asked of a tensor."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def untraced(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, which runs no code of the user's."""
    tracer = sys.gettrace()
    if not (isinstance(tracer, OwnTracer) and tracer.alone):
        return function(*args)
    sys.settrace(None)
    try:
        return function(*args)
    finally:
        sys.settrace(tracer)


class _UntracedProxyMode(ProxyTorchDispatchMode):
    """Records operators as its base does, with the tracing function set aside where they are
    torch's own: what records one is a thousand lines of Python, of which each would be slower by
    what `sys.settrace` costs. Operators of others may run their code, and so may tensors of a class
    of theirs: the tracing function goes on there."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        record = super().__torch_dispatch__
        if _is_own(func) and _FAKE.issuperset(types):
            return untraced(record, func, types, args, kwargs)
        return record(func, types, args, kwargs)


_FAKE = frozenset({FakeTensor})


@lru_cache(maxsize=4096)
def _is_own(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace in _NAMESPACES


@contextmanager
def untraced_operators() -> Iterator[None]:
    """While active, the tracing function is set aside while a `make_fx` that is running records one
    of torch's own operators."""
    mode = get_proxy_mode()
    if type(mode) is not ProxyTorchDispatchMode:
        yield
        return
    mode.__class__ = _UntracedProxyMode
    try:
        yield
    finally:
        mode.__class__ = ProxyTorchDispatchMode
