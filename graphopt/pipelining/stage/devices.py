"""Moving of a stage to the device that it runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from graphopt import _compat


def move_to_device(stage: fx.GraphModule, device: torch.device) -> None:
    """Moves parameters and buffers, and changes the device that operators in the graph name.

    Tensors on the meta device stay there; `to_empty` gives them memory.
    """
    for module in stage.modules():
        if isinstance(module, fx.GraphModule):
            _retarget(module, device)
    if not _is_meta(stage):
        stage.to(device)


def _retarget(graph_module: fx.GraphModule, device: torch.device) -> None:
    changed = False
    for node in graph_module.graph.nodes:
        if not isinstance(node.target, _compat.OpOverload):
            continue
        for index, argument in enumerate(_compat.schema_of(node.target).arguments):
            changed |= _retarget_argument(node, index, argument.name, device)
    if changed:
        graph_module.recompile()


def _retarget_argument(node: fx.Node, index: int, name: str, device: torch.device) -> bool:
    positional = index < len(node.args)
    value: Any = node.args[index] if positional else node.kwargs.get(name)
    if not isinstance(value, torch.device) or value == device:
        return False
    if positional:
        node.update_arg(index, device)
    else:
        node.update_kwarg(name, device)
    return True


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta or _compat.is_fake(tensor) for tensor in module.parameters())
