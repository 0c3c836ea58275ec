"""What is asked of each node of a trace before it is written functionally."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError, GraphOptError
from graphopt.graph_utils import written

aten = torch.ops.aten


@contextmanager
def explained_at(node: fx.Node) -> Iterator[None]:
    """While active, an operator that torch cannot write functionally is refused with its line."""
    try:
        yield
    except GraphOptError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n", 1)[0]
        raise CaptureError(
            f"torch cannot write {node.target} without changing its argument: {first}",
            location=str(node.meta.get("source")),
            hint="use the operator that returns a new tensor",
        ) from error


def refuse_overlapping_writes(node: fx.Node) -> None:
    """Refuse writing to an expanded tensor, some elements of which are one in memory: eager refuses
    most such operators, and lets the order of its kernel decide in the others."""
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
        return
    for target in written(node):
        value = target.meta.get("val")
        if isinstance(value, torch.Tensor) and value.numel() and _is_expanded(value):
            raise CaptureError(
                f"it writes to an expanded tensor, elements of which share memory ({node.target})",
                location=str(node.meta.get("source")),
                hint="write to a copy: tensor.clone()",
            )


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def keep_strides(wrapper: Any, traced: Any) -> None:
    """Let a value have the strides that it has in the trace, which are eager's.

    What functionalization makes of a tensor that was written to may be dense where the tensor has
    gaps, or contiguous where it is transposed. Kernels that go through memory then round otherwise
    (vectorized `sigmoid`, `exp`, …), draw other random numbers, and give other strides themselves.
    """
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return
    value = _compat.from_functional(wrapper)
    if value.stride() == traced.stride():
        return
    strided = aten.new_empty_strided.default(value, list(traced.shape), list(traced.stride()))
    _compat.replace_functional_value(wrapper, aten.copy.default(strided, value))
