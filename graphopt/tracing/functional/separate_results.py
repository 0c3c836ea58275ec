"""Clones of results, so that those with memory of their own in eager code have it in the graph.

    gradient.copy_(flat[0:6])      ──▶   a view of `flat`   ──▶   a clone of that view

Functionalization writes a copy into all of a tensor as the value that is copied. Where both are
left behind by the step (or one is an input), they would share memory that eager code does not
share, and whoever writes to one would change the other.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.graph_utils import call_function_with_meta, get_output
from graphopt.ir.metadata import OF_TRACE, fake_value, known_value, some_of
from graphopt.ir.views import base_of

aten = torch.ops.aten


def keep_apart(raw: fx.Graph, graph: fx.Graph) -> None:
    """Clones results that share memory with an input or another result, but did not in the trace.

    Args:
        raw: the trace, whose values lie where eager's do; its results come first in `graph`.

    Raises:
        CaptureError: of two pairs of results, each of which shares memory, all would.
    """
    output = get_output(graph)
    results = list(cast(Any, output.args[0]))
    traced = list(cast(Any, get_output(raw).args[0]))
    positions: dict[fx.Node, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, (result, before) in enumerate(zip(results, traced, strict=False)):
        memory = _memory(before)
        if memory is not None and _memory(result) is not None:
            positions[base_of(result)][memory].append(position)
    inputs = dict(zip(*(g.find_nodes(op="placeholder") for g in (graph, raw)), strict=True))
    for base, groups in positions.items():
        largest = max(groups, key=lambda each: len(groups[each]))
        owner = _memory(inputs[base]) if base in inputs else largest
        for other in groups.keys() - {owner}:
            if len(groups[other]) > 1:
                raise CaptureError(
                    "it leaves several tensors behind that share memory, which it copies to others",
                    hint="return or keep copies of them (tensor.clone())",
                )
            (position,) = groups[other]
            results[position] = _cloned(graph, results[position], traced[position])
    output.args = (results,)


def _memory(node: object) -> int | None:
    """Returns the storage of a traced tensor; None for other values and tensors without memory."""
    value = known_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return _compat.storage_key(value)


def _cloned(graph: fx.Graph, node: fx.Node, traced: fx.Node) -> fx.Node:
    """Appends a clone with the traced strides to the graph."""
    strides = fake_value(traced).stride()
    with graph.inserting_before(get_output(graph)):
        for options in ({}, {"memory_format": torch.contiguous_format}):
            clone = call_function_with_meta(graph, aten.clone.default, (node,), options, like=node)
            clone.meta.update(some_of(traced, *OF_TRACE))
            if fake_value(clone).stride() == strides:
                return clone
    raise CaptureError(
        "it copies a tensor that has gaps into another one, and leaves both behind",
        hint="return or keep a copy of it (tensor.clone())",
    )
