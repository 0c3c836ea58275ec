"""The mean of CTC losses with plain target lengths, which torch turns into an untraced tensor.

    ctc_loss(log_probs, targets, [12, 11], [4, 3])
        ==>  (ctc_loss(…, reduction="none") / torch.tensor([4, 3]).clamp_min(1)).mean()

That is what torch's own kernel computes, operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MEAN = 1
"""The number of the "mean" reduction in torch's operator."""


def mean_by_numbers(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Tensor] | None:
    """Returns a function that computes the CTC loss, or None if torch's own can be traced."""
    if function is not functional.ctc_loss and function is not torch.ctc_loss:
        return None
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction",
             "zero_infinity")  # fmt: skip
    given: dict[str, Any] = {
        "blank": 0,
        "reduction": "mean" if function is functional.ctc_loss else _MEAN,
        "zero_infinity": False,
    }
    given |= dict(zip(names, args, strict=False)) | dict(kwargs)
    lengths: Any = given.get("target_lengths")
    by_numbers = isinstance(lengths, (list, tuple)) and all(type(each) is int for each in lengths)
    if not by_numbers or given["reduction"] not in ("mean", _MEAN):
        return None

    def computed() -> Tensor:
        losses = functional.ctc_loss(**{**given, "reduction": "none"})
        counts = torch.tensor(list(lengths), dtype=losses.dtype, device=losses.device)
        mean: Tensor = (losses / counts.clamp_min(1)).mean()
        return mean

    return computed
