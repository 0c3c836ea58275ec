"""The mean of label-smoothed, weighted cross entropy, computed as in eager code.

It is divided by the sum of the weights of all targets but those that are ignored. Torch leaves
these out, but where it is traced it adds zeros for them, and so in another order.

    cross_entropy(x, y, weight=w, label_smoothing=0.1)      # some of y are -100
    sum(masked_fill(w[y], y == -100, 0))    ==>    graphopt_eager.sum_without(w[y], y == -100)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from graphopt import _compat
from graphopt.graph_utils import is_operator

_library = torch.library.Library("graphopt_eager", "FRAGMENT")
_library.define("sum_without(Tensor values, Tensor left_out) -> Tensor")


def _sum_without(values: Tensor, left_out: Tensor) -> Tensor:
    return values.masked_select(~left_out).sum()


def _shape(values: Tensor, left_out: Tensor) -> Tensor:
    return values.new_empty(())


_library.impl("sum_without", _sum_without, "CompositeExplicitAutograd")
torch.library.register_fake("graphopt_eager::sum_without", _shape, lib=_library)


def is_weighted(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a torch function is a cross entropy that may divide by a sum of weights."""
    if function is not functional.cross_entropy:
        return False
    target = args[1] if len(args) > 1 else kwargs.get("target")
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    given = [each for each in (target, weight) if isinstance(each, Tensor)]
    return len(given) == 2 and not any(map(_compat.is_transformed, given))


def left_out(node: fx.Node) -> None:
    """Removes weights zeroed by a mask from a node that sums weights, as eager code does."""
    masked = _argument(node, "aten::sum")
    if masked is not None and _argument(masked, "aten::masked_fill_", "aten::gather") is not None:
        node.target = torch.ops.graphopt_eager.sum_without.default
        node.args = masked.args[:2]


def _argument(node: fx.Node, name: str, of: str | None = None) -> fx.Node | None:
    """Returns the first argument of an operator if it is the result of operator `of`, or None."""
    first = node.args[0] if node.args and is_operator(node.target, name) else None
    if not isinstance(first, fx.Node):
        return None
    return first if of is None or is_operator(first.target, of) else None
