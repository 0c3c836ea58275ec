"""Block masks of `torch.nn.attention.flex_attention`, divided along their batch dimension."""

from __future__ import annotations

import sys
from typing import Any


def is_block_mask(value: object) -> bool:
    # Whoever has one has imported the module, which costs a second.
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def batch_size(mask: Any) -> int:
    """The number of batch rows that a mask has entries for; one entry serves all rows."""
    return int(mask.kv_num_blocks.shape[0])
