"""Norms of whole tensors from the norms of the ranks' rows: sum the powers, then take the root."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import fx

from graphopt.ir.operators import argument, is_operator, operator_of


@dataclass(frozen=True)
class NormsOfRows:
    """An intermediate value between the norms of rows and the norms of whole tensors.

    Attributes:
        wholes: the norms of whole tensors: one, or those stacked.
        order: the order of the norms.
        state: "norm" of this rank's rows, its "power", the "total" of powers over ranks, or, after
            the root, "whole".
    """

    wholes: list[fx.Node]
    order: float
    state: str = "norm"
    stacked: bool = False

    def reduced(self, how: str, node: fx.Node) -> NormsOfRows:
        """Returns the value after an all-reduce; only sums of powers and maxima stay norms."""
        if math.isinf(self.order):
            known = how == "max" and self.state == "norm"
            return replace(self, state="whole" if known else "unknown")
        known = how == "sum" and self.state == ("norm" if self.order == 1 else "power")
        after = "whole" if self.order == 1 else "total"
        return replace(self, state=after if known else "unknown")


def norm_order(node: fx.Node) -> float | None:
    """Returns the order of a norm that can be combined from rows, or None."""
    order: Any = argument(node, "ord")
    if argument(node, "dim") is not None or argument(node, "keepdim"):
        return None
    return order if isinstance(order, (int, float)) and order >= 1 else None


def combined_norm(
    node: fx.Node, norms: Mapping[fx.Node, NormsOfRows]
) -> NormsOfRows | fx.Node | None:
    """Returns a node's intermediate value, or the whole norm that it equals, or None if it is
    neither."""
    sources = node.all_input_nodes
    if is_operator(node.target, "aten::stack"):
        found = [norms.get(each) for each in cast(Any, node.args[0])]
        first = found[0]
        if first is None or any(f is None or f.stacked for f in found):
            return None
        if any((f.order, f.state) != (first.order, first.state) for f in found if f):
            return None
        wholes = [whole for f in found if f for whole in f.wholes]
        return replace(first, wholes=wholes, stacked=True)
    known = norms.get(sources[0]) if len(sources) == 1 else None
    if known is None:
        return None
    if operator_of(node).wait:
        return known
    if is_operator(node.target, "aten::pow"):
        power = node.args[1]
        if known.state == "norm" and power == known.order:
            return replace(known, state="power")
        if known.state == "total" and power == 1 / known.order:
            return replace(known, state="whole")
    if is_operator(node.target, "aten::sqrt") and known.state == "total" and known.order == 2:
        return replace(known, state="whole")
    if is_operator(node.target, "aten::select") and known.state == "whole" and known.stacked:
        return known.wholes[cast(int, node.args[2])]
    return None
