"""Private torch APIs of function transforms (`torch.func`).

Written for torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap


def transforms_given(
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> list[tuple[Any, str, Any]]:
    """Replacements by which `torch.func` transforms receive stand-ins for tensors, since they
    wrap arguments unseen by function modes."""
    add_batch_dim: Any = vars(vmap)["_add_batch_dim"]
    wrap_for_grad: Any = vars(eager_transforms)["_wrap_for_grad"]

    def batched(tensor: torch.Tensor, dim: int, level: int) -> torch.Tensor:
        found: torch.Tensor = add_batch_dim(stand_in(tensor), dim, level)
        return found

    def differentiated(tensor: torch.Tensor, level: int) -> torch.Tensor:
        found: torch.Tensor = wrap_for_grad(stand_in(tensor), level)
        return found

    return [(vmap, "_add_batch_dim", batched), (eager_transforms, "_wrap_for_grad", differentiated)]
