"""Sparse tensors under tracing.

How many entries a sparse tensor has depends on values. A fake one knows nothing of that: it says 0
for a sparse gradient, and that it is coalesced. Whatever looks at the entries would decide by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt.errors import CaptureError
from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import source_line
from graphopt.ir.source import SourceLine
from graphopt.ir.user_frames import current_user_line

_OF_ENTRIES = frozenset(
    {"_nnz", "_values", "values", "_indices", "indices", "coalesce", "is_coalesced", "sparse_mask"}
)
_COUNTING = ("aten::_nnz", "aten::is_coalesced", "aten::values", "aten::indices")


def refuse_entries(function: Any, args: Any) -> None:
    """Refuses a torch function that reads the entries of a sparse tensor.

    Raises:
        CaptureError: it does.
    """
    if getattr(function, "__name__", "") not in _OF_ENTRIES:
        return
    if any(isinstance(arg, torch.Tensor) and arg.layout != torch.strided for arg in args):
        raise _refusal(current_user_line())


def refuse_counts(graph: fx.Graph) -> None:
    """Refuses a trace in which torch read the number of entries of a sparse tensor.

    Raises:
        CaptureError: it has.
    """
    for node in graph.nodes:
        if is_operator(node.target, *_COUNTING):
            raise _refusal(source_line(node))


def _refusal(location: SourceLine | None) -> CaptureError:
    return CaptureError(
        "it looks at the entries of a sparse tensor, whose number depends on values",
        location=location,
        hint="make it dense first (tensor.to_dense()); gradients of an embedding are dense with"
        " Embedding(sparse=False), and SGD takes them sparse as well",
    )
