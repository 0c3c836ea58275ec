"""Private torch APIs of pipeline parallelism."""

from __future__ import annotations

import copy
import sys
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import fx, nn


def is_torch_mark(target: object) -> bool:
    """True if a node target is the mark of `torch.distributed.pipelining.pipe_split`."""
    return isinstance(target, torch._ops.OpOverload) and target.name() == "pippy::_pipe_split"


def is_torch_split_point(value: object) -> TypeGuard[Enum]:
    pipelining = sys.modules.get("torch.distributed.pipelining")
    return pipelining is not None and isinstance(value, pipelining.SplitPoint)


def torch_spec_kind(value: object) -> str | None:
    """The kind of a torch chunk spec: "chunk", "replicate" or "reduce"; None for other values."""
    microbatch = sys.modules.get("torch.distributed.pipelining.microbatch")
    if microbatch is None:
        return None
    if value is microbatch._Replicate:
        return "replicate"
    kinds = {"TensorChunkSpec": "chunk", "_Replicate": "replicate", "_CustomReducer": "reduce"}
    found = (k for name, k in kinds.items() if isinstance(value, getattr(microbatch, name)))
    return next(found, None)


def split_block_mask(mask: Any, count: int) -> list[Any]:
    """Divides a block mask into `count` masks of consecutive rows; one for a batch of 1 serves
    all."""
    from torch.distributed.pipelining.microbatch import _split_block_mask

    return _split_block_mask(mask, count)


def flat_calls(graph: fx.Graph) -> None:
    """Makes a graph take and return its placeholders and outputs one by one."""
    graph.set_codegen(fx.graph.CodeGen())


def pytree_specs(exported: fx.GraphModule) -> tuple[Any, Any]:
    """The pytree specs of an exported module's arguments `(args, kwargs)` and result."""
    return exported._in_spec, exported._out_spec


def children_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """The direct submodules by name; a submodule with two names is there twice."""
    return {name: child for name, child in module._modules.items() if child is not None}


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Qualified names of the buffers that are not part of the module's `state_dict`."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }


def fake_copy(module: nn.Module, mode: Any) -> nn.Module:
    """A copy of a module with fake parameters and buffers."""
    from torch._subclasses.fake_tensor import FakeCopyMode

    with FakeCopyMode(mode):
        return copy.deepcopy(module)


class BeforeForwards:
    """A stage base class that acts once before its first forward."""

    def before_first_forward(self) -> None:
        """Runs once before the first forward; schedules call it on all ranks in order of stages."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.before_first_forward()
        return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]
