"""Block masks of `torch.nn.attention.flex_attention`, divided along their batch dimension."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_block_mask(value: object) -> bool:
    # Whoever has one has imported the module, which costs a second.
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def batch_size(mask: Any) -> int:
    """The number of batch rows that a mask has entries for; one entry serves all rows."""
    return int(mask.kv_num_blocks.shape[0])


def split_block_mask(mask: Any, count: int) -> list[Any]:
    """Divides a mask into `count` masks of consecutive rows; sizes differ by at most one."""
    if batch_size(mask) == 1:
        return [mask] * count
    rows = torch.arange(batch_size(mask)).tensor_split(count)
    return [_part(mask, int(part[0]), len(part)) for part in rows]


def _part(mask: Any, start: int, length: int) -> Any:
    """The mask of `length` rows from `start`; in it rows count from 0."""
    part, batch = copy.copy(mask), batch_size(mask)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == batch:
            setattr(part, name, value.narrow(0, start, length))
    part.mask_mod = _shifted(mask.mask_mod, start)
    return part


def _shifted(mask_mod: Callable[..., Tensor], start: int) -> Callable[..., Tensor]:
    """A mask function whose batch index is shifted; flex attention reads its signature."""

    def of_row(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return of_row
