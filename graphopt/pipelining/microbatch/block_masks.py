"""Block masks of `torch.nn.attention.flex_attention`, divided along their batch dimension."""

from __future__ import annotations

import sys


def is_block_mask(value: object) -> bool:
    # Whoever has one has imported the module, which costs a second.
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)
