"""Faster tracing: operators whose results are cached are recorded without torch's dispatch.

What `make_fx` does for one operator takes half a millisecond: it looks for a decomposition, runs
the shape rule behind two more modes, follows constants. Most operators of a step are met again with
arguments of the same kinds: in the next layer, in the next of the traces that a capture makes. What
they give has the same kind then, and what is left to do is to make a tensor of it and a node.

An operator is remembered only where its result follows from the kinds of its arguments and from
settings of torch that are part of the question. Everything else goes torch's own way: values that
are known (`torch.tensor(1.0)`), sizes that depend on values, composite operators, subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    get_proxy_mode,
)
from torch.fx.traceback import has_preserved_node_meta

from graphopt._compat.operator_results import OperatorCall, known_results
from graphopt._compat.tensor_writes import count_writes

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default

_ASKING = frozenset(
    {
        *(aten.size.default, aten.stride.default, aten.storage_offset.default),
        *(aten.is_nonzero.default, aten.lift_fresh.default, aten.lift_fresh_copy.default),
        aten.lift.default,
    }
)
"""Operators that torch records, or answers, in a way of their own."""

_OWN_WAY = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.needs_exact_strides,  # whose nodes keep more
)


class RememberingMode(ProxyTorchDispatchMode):
    """Torch's tracing mode with a cache of operator results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Always False: torch's own mode decides this."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self.answered_or_recorded(func, types, args, kwargs)
        count_writes(func, args, kwargs)
        return result

    def answered_or_recorded(
        self, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        question = None
        if _is_remembered(func) and func not in _decompositions(self):
            with torch._C.DisableTorchFunction():
                question = OperatorCall.of(self.tracer, func, args, kwargs or {})
        if question is None or has_preserved_node_meta():
            return super().__torch_dispatch__(func, types, args, kwargs)
        answer = known_results(question.key)
        if answer.results is not None:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return question.answered(answer, func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not answer.asked:
            with torch._C.DisableTorchFunction():
                question.learn(answer, result)
        return result


def _decompositions(mode: Any) -> Any:
    """The decomposition table of a mode; in torch 2.11, of the process."""
    if hasattr(mode, "decomposition_table"):
        return mode.decomposition_table
    return vars(proxy_tensor)["CURRENT_DECOMPOSITION_TABLE"]


class _QuickTracer(PythonKeyTracer):
    """Torch's tracer with faster creation of operator nodes."""

    def create_node(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        quick = type(target) is BuiltinFunctionType or _is_remembered(target)
        if kind != "call_function" or not quick or has_preserved_node_meta():
            return super().create_node(kind, target, args, kwargs, name, type_expr)
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)


@contextmanager
def remembered() -> Iterator[None]:
    """While active, `make_fx` uses the cache of operator results."""
    mode: Any = get_proxy_mode()
    if not _is_usual(mode):
        yield
        return
    tracer = mode.tracer
    mode.__class__, tracer.__class__ = RememberingMode, _QuickTracer
    try:
        yield
    finally:
        mode.__class__, tracer.__class__ = ProxyTorchDispatchMode, PythonKeyTracer


def _is_usual(mode: Any) -> bool:
    """True if a mode is torch's own tracing mode, which records operators as they are."""
    if type(mode) is not ProxyTorchDispatchMode or type(mode.tracer) is not PythonKeyTracer:
        return False
    return not mode.pre_dispatch and not getattr(mode, "emulate_precision_casts", False)


@lru_cache(maxsize=4096)
def _is_remembered(func: Any) -> bool:
    """True if an operator's result may follow from the kinds of its arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    if func in _ASKING or any(tag in func.tags for tag in _OWN_WAY):
        return False
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return not func.has_kernel_for_dispatch_key(composite)


@lru_cache(maxsize=4096)
def written_as_it_is(func: Any) -> bool:
    """True if functionalization does not change an operator, as long as nobody writes to a view."""
    if not _is_remembered(func) or func._schema.is_mutable:
        return False
    if func.is_view:
        return True
    name, key = func.name(), torch._C.DispatchKey.Functionalize
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
