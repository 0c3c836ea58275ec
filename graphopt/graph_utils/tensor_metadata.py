"""Tensor metadata of nodes: shapes, dtypes, devices and sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt._compat.sizes import symbolic_layout
from graphopt.ir.metadata import known_value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among the leaves of a nest.

    >>> from graphopt.graph_utils import tensors_in
    >>> [len(t) for t in tensors_in(([torch.ones(2)], {"other": torch.ones(3)}, 4))]
    [2, 3]
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):  # of torch's ways through a nest none is as short
        for entry in value:
            yield from tensors_in(entry)
    elif value is not None:
        for leaf in _compat.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def bytes_in(value: Any) -> int:
    """Returns the bytes of the tensors in a nest, those of symbolic shapes left out."""
    tensors = (tensor for tensor in tensors_in(value) if not _compat.has_symbolic_shape(tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor's elements occupy one contiguous range of memory, each exactly once.

    >>> from graphopt.graph_utils import is_dense
    >>> is_dense(torch.ones(2, 3).t()), is_dense(torch.ones(3)[::2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def lies_apart(tensor: torch.Tensor) -> bool:
    """True if no two elements of a tensor share memory; gaps are allowed.

    >>> from graphopt.graph_utils import lies_apart
    >>> lies_apart(torch.ones(4, 3)[:, ::2]), lies_apart(torch.ones(1).expand(3))
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size <= 1:
            continue
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    """True if two nodes hold tensors of one shape, stride, dtype and device.

    >>> from graphopt.graph_utils import find_nodes, is_copy, same_kind
    >>> update = find_nodes(gm.graph, is_copy)[0]
    >>> same_kind(*update.args[:2])
    True
    """
    x, y = known_value(a), known_value(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    if (x.dtype, x.device) != (y.dtype, y.device):
        return False
    if _compat.has_symbolic_shape(x) or _compat.has_symbolic_shape(y):  # which must not be asked
        return symbolic_layout(x) == symbolic_layout(y)
    return x.shape == y.shape and x.stride() == y.stride()
