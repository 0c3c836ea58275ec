"""`copy.deepcopy` of tensors inside a traced step."""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import is_dense
from graphopt.ir.user_frames import current_location


def deepcopied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy of a tensor, recorded in the trace.

    Raises:
        CaptureError: eager's copy is a part of a copied storage, which others may share.
    """
    if isinstance(tensor, torch.nn.Parameter):  # eager copies its values alone
        return _compat.deepcopied(tensor, memo)
    storage = ("storage", _compat.storage_key(tensor))
    if id(tensor) not in memo and (storage in memo or not _is_whole(tensor)):
        raise CaptureError(
            "copy.deepcopy of a tensor that shares its memory with others, or is a part of it",
            location=current_location(),
            hint="copy its values: tensor.detach().clone()",
        )
    memo[storage] = tensor
    return _compat.deepcopied(tensor, memo)


def _is_whole(tensor: torch.Tensor) -> bool:
    if not tensor.is_leaf or not is_dense(tensor):
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
