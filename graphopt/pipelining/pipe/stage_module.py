"""The module of a stage: a graph with its parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from graphopt._compat import pipelining as _private
from graphopt.errors import PartitionError


class StageModule(fx.GraphModule):
    """A graph module that is copied without tracing it again, and is not pickled.

    `torch.fx.GraphModule` would trace its code again: updates of buffers would run meanwhile,
    unused parameters would be lost, and all buffers would become persistent.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PartitionError(
            "the module of a stage cannot be pickled: its graph would be traced anew, and its"
            " buffers updated meanwhile\n"
            "  hint:  save its state_dict(), and make the pipe anew where that is loaded"
        )

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
