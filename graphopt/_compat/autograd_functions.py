"""Calls of `torch.autograd.Function` kept as single nodes during export.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.autograd_function import AutogradFunctionApply
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from torch.fx.experimental import proxy_tensor

Apply = Callable[..., Any]
Handler = Callable[[Any, Apply, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the class of a function, what applies it, and the arguments."""


class _FunctionCall(torch._ops.HigherOrderOperator):
    """The graph target that stands for an autograd function, which its first argument names."""

    def __init__(self) -> None:
        super().__init__("graphopt_function")  # type: ignore[no-untyped-call]

    def __call__(self, index: int, *tensors: torch.Tensor) -> Any:
        raise NotImplementedError("stands in a graph until it has been exported")


CALL = _FunctionCall()
fx.node.has_side_effect(CALL)  # so that export keeps calls whose result nobody reads

_one_at_a_time = threading.RLock()

_APPLIES_ITSELF = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""Whether `Function.apply` is written in C, as from torch 2.15 on."""


@contextmanager
def functions_handled_by(handler: Handler, unseen: Callable[[Any], None]) -> Iterator[None]:
    """While active, `handler` receives autograd functions that are applied while this thread
    traces.

    Up to torch 2.14 `Function.apply` finds what applies it by the order of base classes, also where
    it was bound before; so that base class is given another one. From 2.15 on `Function.apply` is
    that itself and is replaced. Of a function that was bound before (`f = F.apply`) all that is
    seen there is that its forward is looked up: `unseen` is called with its class.
    """
    own = threading.get_ident()
    owner: Any = torch.autograd.Function if _APPLIES_ITSELF else _SingleLevelFunction
    original = vars(owner).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if original is not None:
            applied = original.__get__(None, cls)
        else:
            applied = super(_SingleLevelFunction, cls).apply
        if threading.get_ident() != own or not is_tracing():
            return applied(*args, **kwargs)
        with handling():
            return handler(cls, applied, args, kwargs)

    depth = [0]

    @contextmanager
    def handling() -> Iterator[None]:
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    def looked_up(cls: Any, name: str) -> Any:
        if name == "forward" and not depth[0] and threading.get_ident() == own and is_tracing():
            with handling():
                unseen(cls)
        return type.__getattribute__(cls, name)

    with _one_at_a_time:
        owner.apply = classmethod(apply)
        if _APPLIES_ITSELF:
            FunctionMeta.__getattribute__ = looked_up  # type: ignore[method-assign]
        try:
            yield
        finally:
            if _APPLIES_ITSELF:
                del FunctionMeta.__getattribute__
            if original is None:
                delattr(owner, "apply")
            else:
                owner.apply = original


@contextmanager
def tracing_paused() -> Iterator[None]:
    """While active, nothing is traced, not even changes of grad mode."""
    with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


def is_tracing() -> bool:
    """True if operators on this thread become nodes."""
    return proxy_tensor.get_proxy_mode() is not None


def traced_tensors() -> Container[torch.Tensor]:
    """The tensors for which the graph under construction has a node."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "to be called while tracing"
    return mode.tracer.tensor_tracker


def record_call(index: int, name: str, tensors: Sequence[torch.Tensor], result: Any) -> Any:
    """Records a node that computes `result` from `tensors`."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "to be called while tracing"
    tracer: Any = mode.tracer
    arguments = [tracer.unwrap_proxy(tensor) for tensor in tensors]
    proxy = tracer.create_proxy("call_function", CALL, (index, *arguments), {}, name=name)
    return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def is_function(cls: type) -> bool:
    """True if a class is a user's autograd function, not one that `torch.func` generates."""
    return issubclass(cls, torch.autograd.Function) and cls.__module__ != (
        AutogradFunctionApply.__module__
    )


def is_reentrant_checkpoint(cls: type) -> bool:
    """True if a class is the autograd function of a checkpoint with `use_reentrant=True`."""
    return cls.__module__ == "torch.utils.checkpoint"


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that stand for autograd functions."""
    return graph.find_nodes(op="call_function", target=CALL)


def saved_tensor_hooks_are_foreign() -> bool:
    """True if saved-tensor hooks other than torch's checkpoints are active."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(hooks[0].__module__).startswith("torch.")


def module_backward_hooks(module: nn.Module) -> bool:
    """True if a module has backward hooks, its own or those of all modules."""
    everywhere = torch.nn.modules.module
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )
