"""Values of nodes that depend on no input, so that sizes computed from them are known.

torch.unique_consecutive(torch.tensor([8, 8, 4]))    has two elements, in every call
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_collective, without_autocast
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import draws, is_marker, row
from graphopt.tracing.functional.values import copied_constant


class ConstantValues:
    """The constant values of one trace, computed on the CPU on demand.

    Args:
        tracer: records the step.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._constant: set[fx.Node] = set()
        self._values: dict[fx.Node, Any] = {}
        self._seen = 0
        self._overwritten = False

    def laid_out_like(self, wanted: fx.Node) -> Any | None:
        """Returns an example of a node's value with its constant sizes, or its integer; None if
        these are not constant.

        Args:
            wanted: is being recorded: the last node, which has no fake value yet.
        """
        nodes = list(self._tracer.graph.nodes)[:-1]
        new, self._seen = nodes[self._seen :], len(nodes)
        for node in new:
            self._look_at(node)
        deciding = set(wanted.all_input_nodes)
        if wanted.target in _SIZED_BY_REST and isinstance(wanted.args[0], fx.Node):
            deciding.discard(wanted.args[0])
        if self._overwritten or not self._constant.issuperset(deciding) or not _is_constant(wanted):
            return None
        with _compat.without_modes(), torch.no_grad(), without_autocast():
            for node in nodes:
                if node in self._constant and node not in self._values:
                    self._values[node] = self._computed(node)
            return self._computed(wanted)

    def _look_at(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        repeats = _is_constant(node) and all(
            map(_is_alike_anywhere, _compat.tree_leaves(known_value(node)))
        )
        if repeats and self._constant.issuperset(sources):
            self._constant.add(node)
        elif isinstance(node.target, _compat.OpOverload) and row(node.target).writes:
            self._overwritten |= not self._constant.isdisjoint(sources)

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = copied_constant(getattr(self._tracer.root, str(node.target)))
            return value.cpu() if isinstance(value, torch.Tensor) else value
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value_of)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        target: Any = node.target
        return target(*args, **kwargs)

    def _value_of(self, node: fx.Node) -> Any:
        if node in self._constant:
            return self._values[node]
        layout = fake_value(node)
        return torch.empty((), dtype=layout.dtype).expand(layout.shape)


_SIZED_BY_REST = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default})
"""Operators whose result sizes do not depend on the first argument's values."""


def _is_constant(node: fx.Node) -> bool:
    """True if a node's result depends on nothing but its arguments."""
    if node.op == "get_attr" or node.target is getitem:
        return True
    if not isinstance(node.target, _compat.OpOverload) or node.target.namespace != "aten":
        return False
    made = "empty" in _compat.operator_name(node.target)
    return not (made or draws(node) or is_collective(node) or is_marker(node))


def _is_alike_anywhere(value: Any) -> bool:
    """True if the CPU computes the same bits as other devices, as it does for integers."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return True
    return not (value.is_floating_point() or value.is_complex())
