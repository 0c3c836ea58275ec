"""Modules that are not what they seem: sharded, compiled; and how a call of one runs."""

from __future__ import annotations

from types import CodeType

import torch.distributed as dist
from torch import nn


def is_fsdp(module: nn.Module) -> bool:
    """FSDP's wrapper (FSDP1) or a module that `fully_shard` changed (FSDP2)."""
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, (FullyShardedDataParallel, FSDPModule))


def is_compiled_module(module: nn.Module) -> bool:
    """`torch.compile(module)`, or a module whose `.compile()` was called."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def module_call_code() -> CodeType:
    """Code of the frame in which a module's forward and hooks run."""
    return nn.Module._call_impl.__code__
