"""Singular values and eigenvalues without vectors, computed as in eager code.

torch computes vectors as well where a gradient may be asked for, or where it is traced; without
them LAPACK takes another way, which rounds otherwise.

    with torch.no_grad(): torch.linalg.svdvals(w)
    _linalg_svd(w, False, True)    ==>    _linalg_svd(w, False, False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat

OPERATORS = ("aten::_linalg_svd", "aten::_linalg_eigh")
"""Operators whose last positional argument says if vectors are computed."""

_WITHOUT_VECTORS: dict[Any, tuple[Any, ...]] = {
    torch.ops.aten._linalg_svd.default: (None, False, False),
    torch.ops.aten._linalg_eigh.default: (None, "L", False),
}
_OF_VALUES = frozenset(
    {"svdvals", "eigvals", "eigvalsh", "matrix_norm", "norm", "cond", "matrix_rank", "nuclear_norm"}
)
"""Functions that compute vectors only for gradients."""


def gives_values_alone(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a torch function computes no vectors in eager code."""
    if getattr(function, "__name__", "").removeprefix("linalg_") not in _OF_VALUES:
        return False
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if any(map(_compat.is_transformed, tensors)):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))


def alone(function: Any) -> Any:
    """Returns a function that computes only the values: an operator, or the function itself if its
    nodes are changed by `without_vectors`."""
    is_general = function is torch.linalg.eigvals
    return torch.ops.aten._linalg_eigvals.default if is_general else function


def without_vectors(node: fx.Node) -> None:
    """Changes a new node so that it computes no vectors."""
    defaults = _WITHOUT_VECTORS.get(node.target)
    if defaults is not None:
        node.args = (*node.args[:2], *defaults[len(node.args[:2]) :])
