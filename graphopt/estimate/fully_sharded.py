"""FSDP2 on the arguments of a step, as a peer of sharded steps: each layer is one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from graphopt.errors import GraphOptError


def shard_fully(arguments: Sequence[Any]) -> None:
    """Shards models over the ranks of the default group, in place; optimizers then update shards.

    The items of the outermost `ModuleList` and `Sequential` containers with parameters are units,
    and so is all the rest of a model.

    Raises:
        GraphOptError: an optimizer has state already, which would have to be sharded too.
    """
    optimizers = [each for each in arguments if isinstance(each, torch.optim.Optimizer)]
    if any(optimizer.state for optimizer in optimizers):
        raise GraphOptError("the optimizer has state before the first step")
    sharded: dict[int, nn.Parameter] = {}
    for model in arguments:
        parameters = _parameters(model) if isinstance(model, nn.Module) else {}
        if not parameters:
            continue
        device = next(iter(parameters.values())).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        after = _parameters(model)
        sharded |= {id(was): after[name] for name, was in parameters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sharded.get(id(each), each) for each in group["params"]]


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the items of the outermost containers."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _layers(child)
