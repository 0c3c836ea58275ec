"""Proof that a momentum that starts as negative zeros becomes the first value added to it.

    buffer.mul_(0.9).add_(gradient)        from negative zeros: the gradient, bit for bit

Eager code begins with ``buffer = gradient.clone()``. Both are the same step where nothing else is
done to the buffer before the value has been added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import known_value


class FirstMomenta:
    """Tracks momenta through a graph until their first value has been added.

    Args:
        momenta: nodes that are negative zeros when the graph begins.
        number_of: the value of a placeholder that is a Python number, if it is one.

    Attributes:
        first: the value that a momentum becomes, by the momentum.
    """

    def __init__(
        self, momenta: Iterable[fx.Node], number_of: Callable[[Any], float | None]
    ) -> None:
        self._momentum = {momentum: momentum for momentum in momenta}
        self._number_of = number_of
        self.first: dict[fx.Node, fx.Node] = {}

    def is_zeros(self, node: Any) -> bool:
        """True if a node is a momentum that is still zeros."""
        momentum = self._momentum.get(node)
        return momentum is not None and momentum not in self.first

    def takes(self, node: fx.Node) -> bool:
        """True if a node only scales zero momenta or adds their first values."""
        if len(node.args) < 2:
            return False
        if is_operator(node.target, "aten::mul_", "aten::_foreach_mul_"):
            return self._scales(node)
        if is_operator(node.target, "aten::add_", "aten::_foreach_add_"):
            return self._adds(node)
        return is_operator(node.target, "aten::_fused_sgd_") and self._adds_scaled(node)

    def _scales(self, node: fx.Node) -> bool:
        momenta = _listed(node.args[0])
        if not all(map(self.is_zeros, momenta)) or not self._is_positive(node.args[1]):
            return False
        if isinstance(node.args[0], fx.Node):
            self._momentum[node] = self._momentum[momenta[0]]
        return True

    def _adds(self, node: fx.Node) -> bool:
        factor = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
        if type(factor) not in (int, float) or factor != 1:
            return False
        if not self._become(_listed(node.args[0]), _listed(node.args[1])):
            return False
        if isinstance(node.args[0], fx.Node):
            self._momentum[node] = self._momentum[node.args[0]]
        return True

    def _adds_scaled(self, node: fx.Node) -> bool:
        """True if a fused SGD node adds the first value to each zero momentum."""
        given = node.kwargs
        whole = given.get("dampening") == 0 and not given.get("is_first_step")
        if not whole or not self._is_positive(given.get("momentum")):
            return False
        return self._become(_listed(node.args[2]), _listed(node.args[1]))

    def _become(self, momenta: list[Any], values: list[Any]) -> bool:
        if not all(map(self.is_zeros, momenta)) or len(momenta) != len(values):
            return False
        pairs = [(self._momentum[m], v) for m, v in zip(momenta, values, strict=True)]
        if not all(_fits(momentum, value) for momentum, value in pairs):
            return False
        self.first.update(pairs)
        return True

    def _is_positive(self, factor: Any) -> bool:
        if isinstance(factor, fx.Node) and is_operator(factor.target, "aten::_local_scalar_dense"):
            factor = self._number_of(factor.args[0])
        return type(factor) in (int, float) and 0 < factor < math.inf


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fits(momentum: fx.Node, value: Any) -> bool:
    """True if adding a value to a momentum of negative zeros gives a copy of the value."""
    if not isinstance(value, fx.Node):
        return False
    x, y = known_value(momentum), known_value(value)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    if (x.shape, x.dtype, x.device, x.layout) != (y.shape, y.dtype, y.device, y.layout):
        return False
    return x.layout is torch.strided and x.stride() == torch.empty_like(y).stride()
