"""Moving of a stage to the device that it runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphopt import _compat


def move_to_device(stage: fx.GraphModule, device: torch.device) -> None:
    """Moves parameters and buffers, and changes the device that operators in the graph name.

    Tensors on the meta device stay there; `to_empty` gives them memory.
    """
    for module in stage.modules():
        if isinstance(module, fx.GraphModule):
            _retarget(module, device)
    if not any(tensor.is_meta or _compat.is_fake(tensor) for tensor in stage.parameters()):
        stage.to(device)


def _retarget(graph_module: fx.GraphModule, device: torch.device) -> None:
    def retargeted(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph_module.graph.nodes:
        if isinstance(node.target, _compat.OpOverload):
            given = node.args, node.kwargs
            node.args, node.kwargs = fx.node.map_aggregate(given, retargeted)
    graph_module.recompile()
