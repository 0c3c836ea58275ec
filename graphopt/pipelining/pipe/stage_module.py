"""The module of a stage: a graph with its parameters and buffers that can be pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from graphopt import _compat
from graphopt._compat import pipelining as _private
from graphopt.ir.metadata import MODULES

_KEPT_META = (MODULES, "stack_trace")


class StageModule(fx.GraphModule):
    """A graph module that can be pickled and copied without tracing it again.

    `torch.fx.GraphModule` would trace its code again: updates of buffers would run while loading,
    unused parameters would be lost, and all buffers would become persistent. Shapes of intermediate
    values (`meta["val"]`) stay behind.
    """

    def __reduce__(self) -> tuple[Callable[..., StageModule], tuple[Any, ...]]:
        return _load, (_holder(self), _encode(self.graph))

    def __deepcopy__(self, memo: dict[int, Any] | None) -> StageModule:
        return make_stage_module(copy.deepcopy(_holder(self), memo), copy.deepcopy(self.graph))


def make_stage_module(holder: nn.Module, graph: fx.Graph) -> StageModule:
    """A module that runs `graph` on the parameters and buffers of `holder`."""
    result = StageModule(nn.Module(), fx.Graph())
    _share(holder, result)
    result.graph = graph
    result.recompile()
    return result


def _holder(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    _share(module, holder)
    return holder


def _share(source: nn.Module, target: nn.Module) -> None:
    for name, child in _private.children_by_name(source).items():
        target.add_module(name, _sharing(child))
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        target.register_parameter(name, parameter)
    hidden = _private.non_persistent_buffers(source)
    for name, buffer in source.named_buffers(recurse=False, remove_duplicate=False):
        target.register_buffer(name, buffer, persistent=name not in hidden)


def _sharing(child: nn.Module) -> nn.Module:
    """A copy of a submodule that holds the same tensors."""
    if isinstance(child, fx.GraphModule):
        return make_stage_module(child, copy.deepcopy(child.graph))
    return _holder(child)


# ---------------------------------------------------------------------------- graphs as values


@dataclass(frozen=True)
class _SavedReference:
    """The pickled form of a node that is another node's argument."""

    name: str


@dataclass(frozen=True)
class _SavedOperator:
    """The pickled form of an operator, which torch itself does not pickle."""

    name: str
    overload: str | None


_SavedNode = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""The pickled form of a node: op, name, target, arguments, and metadata."""


def _encode(graph: fx.Graph) -> list[_SavedNode]:
    def refer(value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: cast(Any, _SavedReference(node.name)))

    found = []
    for node in graph.nodes:
        meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        target, args, kwargs = _encode_target(node.target), refer(node.args), refer(node.kwargs)
        found.append((node.op, node.name, target, args, kwargs, meta))
    return found


def _load(holder: nn.Module, records: list[_SavedNode]) -> StageModule:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def resolve(value: Any) -> Any:
        return fx.node.map_aggregate(
            value, lambda leaf: nodes[leaf.name] if isinstance(leaf, _SavedReference) else leaf
        )

    for op, name, target, args, kwargs, meta in records:
        target = _decode_target(target)
        nodes[name] = graph.create_node(op, target, resolve(args), resolve(kwargs), name=name)
        nodes[name].meta = dict(meta)
    return make_stage_module(holder, graph)


def _encode_target(target: Any) -> Any:
    if isinstance(target, _compat.OpOverload):
        return _SavedOperator(_compat.operator_name(target), _compat.overload_name(target))
    if isinstance(target, _compat.HigherOrderOperator):
        return _SavedOperator(target.name(), None)
    return target


def _decode_target(target: Any) -> Any:
    if not isinstance(target, _SavedOperator):
        return target
    if target.overload is None:
        return getattr(torch.ops.higher_order, target.name)
    namespace, _, name = target.name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), target.overload)
