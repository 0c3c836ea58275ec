"""Constant folding for decisions on fake tensors: computes values that depend on constants only.

    mask = full((n, n), -inf).triu(1)      all that the answer needs, and nothing else, runs on
    if (mask == other).all(): …            the CPU; True is what any device finds

A model given as fake tensors may still ask about a mask that the step itself makes. An answer that
depends on a parameter or on a batch stays unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import without_autocast
from graphopt.host.assumptions import Assumption
from graphopt.ir.metadata import known_value, storages_of
from graphopt.ir.operators import operator_of, written
from graphopt.ir.user_frames import current_location
from graphopt.runtime.recaptures import WITHOUT_BRANCHES

_EXACT = """
full zeros ones eye scalar_tensor new_full new_zeros new_ones full_like zeros_like ones_like
empty new_empty empty_like tril_indices triu_indices lift_fresh lift_fresh_copy
_to_copy clone copy fill zero cat stack repeat flip roll index_select gather constant_pad_nd
tril triu where masked_fill maximum minimum max min amax amin neg abs all any isnan isinf
eq ne lt le gt ge equal logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not bitwise_xor _local_scalar_dense
"""
_INTEGERS = "arange add sub rsub mul sum cumsum count_nonzero"

EXACT = frozenset(f"aten::{name}" for name in _EXACT.split())
"""Operators that no device rounds otherwise, without the mark of those in place."""

EXACT_ON_INTEGERS = frozenset(f"aten::{name}" for name in _INTEGERS.split())
"""The same, where no operand and no result is a fraction."""

_CPU = torch.device("cpu")


class KnownValues:
    """The values in a trace that depend on constants alone.

    Args:
        tracer: records the step.
        live: values of the inputs in this call; a real one among fake ones is known.
    """

    def __init__(self, tracer: Any, live: Sequence[torch.Tensor]) -> None:
        self._tracer, self._live = tracer, live

    def of(self, wanted: Any) -> Any:
        """Computes the value of a node on the CPU.

        Raises:
            CaptureError: it depends on what has no value here.
        """
        if not isinstance(wanted, fx.Node):
            return wanted
        values: dict[fx.Node, Any] = {}
        with _compat.without_modes(), torch.no_grad(), without_autocast():
            for node in history(self._tracer.graph, wanted):
                values[node] = self._value(node, values)
        return values[wanted]

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "call_function" and is_exact(node):
            return _computed(node, values)
        value = self._constant(node)
        if value is None:
            raise CaptureError(
                "Python code depends on the value of a tensor, and the tensors given are fake ones",
                location=current_location(),
                hint=f"{WITHOUT_BRANCHES}, or decide by what the step itself makes of constants,"
                " as a mask, or capture with real tensors",
            )
        return value

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        """The value of an input or constant, or None if it is unknown."""
        if node.op == "placeholder":
            placeholders = self._tracer.graph.find_nodes(op="placeholder")
            return _compat.value_of(self._live[placeholders.index(node)])
        if node.op == "get_attr":
            return _compat.value_of(getattr(self._tracer.root, str(node.target)))
        return None


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    return target(*args, **{key: _here(value) for key, value in kwargs.items()})


def history(graph: fx.Graph, wanted: fx.Node) -> list[fx.Node]:
    """The nodes that must run to compute a node's value, in order, with earlier writes to the
    memory that they read."""
    needed, memory = {wanted}, storages_of(wanted)
    found = []
    for node in reversed(graph.nodes):
        writes = any(not memory.isdisjoint(storages_of(target)) for target in written(node))
        if (node not in needed and not writes) or isinstance(node.target, Assumption):
            continue
        found.append(node)
        needed.update(node.all_input_nodes)
        memory.update(*map(storages_of, node.all_input_nodes))
    return found[::-1]


def is_exact(node: fx.Node) -> bool:
    """True if a node's operator gives the same bits on all devices."""
    if not isinstance(node.target, _compat.OpOverload):
        return getattr(node.target, "__module__", None) in ("_operator", "math")
    name = _compat.operator_name(node.target).removesuffix("_")
    if operator_of(node).view or name in EXACT:
        return True
    values = [known_value(argument) for argument in (node, *node.all_input_nodes)]
    return name in EXACT_ON_INTEGERS and not any(map(_is_fraction, values))


def _is_fraction(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, (int, torch.SymInt, torch.SymBool))


def _here(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) else value
