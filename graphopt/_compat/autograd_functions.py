"""`torch.autograd.Function` calls, seen while this thread traces.

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch.autograd_function import AutogradFunctionApply
from torch.autograd.function import FunctionMeta

from graphopt._compat.tracers import is_traced

_one_at_a_time = threading.RLock()


@contextmanager
def functions_seen_by(handler: Callable[[Any], None]) -> Iterator[None]:
    """While active, `handler` is called with the class of each autograd function that this thread
    applies while it traces.

    In every release what applies a function looks up its `forward`, also where `apply` was bound
    before (`f = F.apply`).
    """
    own = threading.get_ident()

    def looked_up(cls: Any, name: str) -> Any:
        if name == "forward" and threading.get_ident() == own and is_traced():
            handler(cls)
        return type.__getattribute__(cls, name)

    with _one_at_a_time:
        FunctionMeta.__getattribute__ = looked_up  # type: ignore[method-assign]
        try:
            yield
        finally:
            del FunctionMeta.__getattribute__


def is_generated(cls: type) -> bool:
    """True if torch has made a class of a user's autograd function, for `torch.cond` or a
    transform."""
    return cls.__module__ == AutogradFunctionApply.__module__


def is_reentrant_checkpoint(cls: type) -> bool:
    """True if a class is the autograd function of a checkpoint with `use_reentrant=True`."""
    return cls.__module__ == "torch.utils.checkpoint"


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
