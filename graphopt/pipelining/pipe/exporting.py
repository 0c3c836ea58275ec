"""Export of a model as one flat graph that keeps the model's parameter names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt._compat import pipelining as _private
from graphopt._compat.autograd_functions import functions_seen_by
from graphopt.errors import PartitionError
from graphopt.pipelining.errors import LostGradientError, ModuleCaptureError
from graphopt.pipelining.pipe.calling_convention import CallingConvention, OutputSpec
from graphopt.pipelining.pipe.gradient_watch import GradientWatch, check_module_hooks
from graphopt.pipelining.pipe.marks import (
    annotated_labels,
    is_mark,
    mark_label,
    remove_split_points,
)
from graphopt.pipelining.pipe.model_tensors import ModelTensors
from graphopt.pipelining.pipe.mutation import nested_graphs

REGION = "region_{}"
"""Attribute name of the graph of an autocast or grad-mode region."""


@dataclass
class ExportedModel:
    """An exported graph: one placeholder per argument leaf, one tuple of output leaves.

    Parameters, buffers and constants are `get_attr` nodes, one per tensor.
    """

    graph_module: fx.GraphModule
    state: ModelTensors
    calling: CallingConvention
    output_spec: OutputSpec


def export_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None,
) -> ExportedModel:
    """Exports `module` on example arguments as one graph.

    Split points annotated on the module are removed afterwards, also when tracing fails.

    Raises:
        ModuleCaptureError: the module is not one graph.
        LostGradientError: the graph would not have the module's gradients.
        PartitionError: an annotated submodule is never called, a mark stands inside a region, or
            `split_policy` returns no graph.
    """
    labels = annotated_labels(module)
    try:
        calling = CallingConvention(module, args, kwargs)
        traced = _export(module, *calling.arrange(args, kwargs))
    finally:
        remove_split_points(module)
    _, output_spec = _private.pytree_specs(traced)
    _private.flat_calls(traced.graph)
    _rename_regions(traced)
    _check_marks(traced, labels)
    state = ModelTensors(module, traced)
    _one_node_per_tensor(traced.graph, state)
    if split_policy is not None:
        traced = split_policy(traced)
        if not isinstance(traced, fx.GraphModule):
            raise PartitionError(
                f"split_policy returned {traced!r}; it returns the GraphModule that it was given,"
                " with marks in it"
            )
    return ExportedModel(traced, state, calling, OutputSpec(output_spec))


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    check_module_hooks(module)
    watch = GradientWatch()
    try:
        with functions_seen_by(watch.refuse_function), watch:
            program = torch.export.export(module, args, kwargs, strict=False)
    except LostGradientError:
        raise
    except Exception as error:
        refusal = watch.refusal or ModuleCaptureError(type(module).__name__, error)
        raise refusal from error
    if watch.refusal is not None:
        raise watch.refusal
    return program.module(check_guards=False)


def _rename_regions(traced: fx.GraphModule) -> None:
    """Renames regions that export calls `submod_<i>`, the name of partitions here."""
    regions = nested_graphs(traced, traced.graph)
    for name in {str(node.target) for node in regions}:
        delattr(traced, name)
    for index, (node, graph_module) in enumerate(regions.items()):
        node.target = REGION.format(index)
        traced.add_module(node.target, graph_module)


def _check_marks(traced: fx.GraphModule, labels: list[str]) -> None:
    for graph_module in nested_graphs(traced, traced.graph).values():
        for inner in graph_module.modules():
            marks = filter(is_mark, inner.graph.nodes) if isinstance(inner, fx.GraphModule) else ()
            for mark in marks:
                raise PartitionError(
                    f"{mark_label(mark)} stands inside an autocast, no_grad or other region, which"
                    " cannot be divided; move it outside the `with` block"
                )
    reached = {mark_label(node) for node in traced.graph.nodes if is_mark(node)}
    for label in labels:
        if label not in reached:
            raise PartitionError(
                f"split point {label} was never reached: the submodule is not called in forward"
                " (a ModuleList is not called itself; name one of its members)"
            )


def _one_node_per_tensor(graph: fx.Graph, state: ModelTensors) -> None:
    """Merges the nodes of tied parameters, and removes unused ones."""
    first: dict[int, fx.Node] = {}
    attributes = graph.find_nodes(op="get_attr")
    for node in attributes:
        tensor = state.tensor(str(node.target))
        if tensor is not None and first.setdefault(id(tensor), node) is not node:
            node.replace_all_uses_with(first[id(tensor)])
    for node in attributes:
        if not node.users:
            graph.erase_node(node)
    graph.lint()
