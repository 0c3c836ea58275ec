"""The gradient of a cross entropy, without a sum over classes.

The gradient of `nll_loss` has one element in each row that is not zero. The gradient of
`log_softmax` adds up each row, which compiled code does element by element; the sum is that one.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt import _compat
from graphopt.graph_utils import is_operator

aten = torch.ops.aten


class RowSums:
    """Calls operators, and remembers the row sums of gradients that `nll_loss_backward` returns.

    Nobody may update these gradients in place.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def handles(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if `call` knows another way to do this."""
        if kwargs:
            return False
        if is_operator(target, "aten::nll_loss_backward"):
            return bool(args[1].dim() == 2)
        if is_operator(target, "aten::_log_softmax_backward_data"):
            gradient, result, dim, dtype = args
            return gradient in self._sums and dim in (1, -1) and bool(dtype == result.dtype)
        return False

    def call(self, target: _compat.OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
        """Compute the operator."""
        if is_operator(target, "aten::nll_loss_backward"):
            gradient: torch.Tensor = target(*args)
            self._sums[gradient] = _row_sums(*args)
            return gradient
        gradient, result, *_ = args
        return gradient - torch.exp(result) * self._sums[gradient]


def _row_sums(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    classes: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Row sums of what `nll_loss_backward` returns for these arguments, rows x 1."""
    counted = classes != ignore_index
    if reduction == 1:  # the mean
        gradient = gradient / total_weight
    if weight is not None:
        gradient = gradient * weight[torch.where(counted, classes, 0)]
    return -torch.where(counted, gradient, 0).unsqueeze(1)
