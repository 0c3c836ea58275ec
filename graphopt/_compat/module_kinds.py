"""Private facts about modules: FSDP, `torch.compile`, recurrent layers, and the frame of a call."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

own_parameters: attrgetter[dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: attrgetter[dict[str, torch.Tensor | None]] = attrgetter("_buffers")
own_modules: attrgetter[dict[str, nn.Module | None]] = attrgetter("_modules")
own_tables: attrgetter[tuple[dict[str, Any], ...]] = attrgetter(
    "_parameters", "_buffers", "_modules"
)
"""The tables of a module itself, without those of the modules in it; all three together."""


def weights_of_layers(module: nn.Module) -> list[Any]:
    """The flat weight list of a recurrent module, which its forward rebuilds if weights change;
    else empty."""
    found = vars(module).get("_flat_weights") if isinstance(module, nn.RNNBase) else None
    return found if type(found) is list else []


def is_fsdp(module: nn.Module) -> bool:
    """True if a module is FSDP's wrapper (FSDP1) or was changed by `fully_shard` (FSDP2)."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, (FullyShardedDataParallel, FSDPModule))


def is_compiled_module(module: nn.Module) -> bool:
    """True for `torch.compile(module)`, or if the module's `.compile()` was called."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def module_call_code() -> CodeType:
    """The code object of the frame in which a module's forward and hooks run."""
    return nn.Module._call_impl.__code__


def floats_of_statistics(convert: Callable[[Any], Any]) -> tuple[Any, str, Callable[..., Any]]:
    """Replacements by which BatchNorm calls `convert` instead of `float` on its number of
    batches."""
    return torch.nn.modules.batchnorm, "float", convert


_APPLY: Any = nn.Module._apply


def _moved(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return module if all(fn(t) is t for t in tensors) else _APPLY(module, fn, recurse)


def moved_where_needed() -> tuple[Any, str, Callable[..., Any]]:
    """Replacements by which `module.to(…)` does nothing if device and dtype already fit; torch
    swaps fake parameters even then."""
    return nn.Module, "_apply", _moved
