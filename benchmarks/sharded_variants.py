"""The sharded training variants that `sharded.py` compares."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from figures import Figures
from overlap import ADAM, Training
from step_models import Block
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from graphopt.demo.model import Block as GPTBlock

PLAIN, TUNED = "FSDP2, plain", "FSDP2, tuned"


class ZeroOptimizer(Training):
    """DDP with the sharded optimizer of `torch.distributed.optim`."""

    def __init__(self, task: Figures, buckets_mb: float) -> None:
        super().__init__(task, buckets_mb)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAM
        )


class FullySharded(Training):
    """FSDP2 with a group for each block.

    Args:
        tuned: gathers run beside compute and one block ahead, and scatters send half of what
            gloo's own do.
        reshard: parameters are gathered again for the backward.
    """

    def __init__(self, task: Figures, *, tuned: bool = False, reshard: bool = True) -> None:
        super().__init__(task)
        blocks = [m for m in self.model.modules() if isinstance(m, (Block, GPTBlock))]
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshard)
        root: Any = fully_shard(self.model, reshard_after_forward=reshard)
        if tuned:
            self._tune(root, blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAM)

    def _tune(self, root: Any, blocks: list[Any]) -> None:
        root._set_unshard_async_op(True)
        for one, following in zip([root, *blocks], blocks, strict=False):
            one.set_modules_to_forward_prefetch([following])
        for before, one in pairwise(blocks):
            one.set_modules_to_backward_prefetch([before])
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_exchange())


def _exchange() -> Any:
    """A reduce-scatter for FSDP2 by exchange and sum, which sends half of gloo's bytes. FSDP2's
    interface for it is private to torch."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    class Exchange(DefaultAllocMixin, ReduceScatter):  # type: ignore[misc]
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            got = torch.empty_like(input_tensor)
            dist.all_to_all_single(got, input_tensor, group=group)
            parts = got.view(group.size(), -1)
            torch.add(parts[0], parts[1], out=output_tensor)
            for part in parts[2:]:
                output_tensor.add_(part)
            with contextlib.suppress(TypeError):
                if op == dist.ReduceOp.AVG:
                    output_tensor.mul_(1 / group.size())

    return Exchange()
