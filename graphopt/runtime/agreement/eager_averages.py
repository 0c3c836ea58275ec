"""Averages of gradients, and broadcasts of buffers, for eager steps, as DDP inserts them.

DistributedDataParallel wraps a model, and the code of a step then sees the wrapper in its place.
Here nothing is wrapped: hooks on the parameters, removed after each call, do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from graphopt import _compat
from graphopt._compat.backward import after_backward, is_in_backward
from graphopt.errors import GraphOptError
from graphopt.parallel.data_parallel import average, broadcast_buffers
from graphopt.parallel.markers import Group
from graphopt.ranks.buffer_groups import group_of_buffers
from graphopt.ranks.failed_runs import sending_explained
from graphopt.tracing.call import Call


class Averages:
    """Averages the gradients of one eager call of a step over a process group.

    At the end of each backward the ranks say which parameters have received a gradient; each that
    has one on any rank is averaged on all, with zeros where there is none: the arithmetic of
    DDP with ``find_unused_parameters=True``, for accumulated gradients as well. Parameters of
    modules that communicate for themselves (DDP, FSDP) are left to these.

    Args:
        call: the call; parameters of its modules and of its optimizers are averaged.
        group: the ranks.
        step: the number of the step's call, counted from 1; for errors.
        shared: modules of the call that all ranks have, whose buffers they share.
    """

    def __init__(
        self, call: Call, group: dist.ProcessGroup, step: int, shared: Sequence[nn.Module]
    ) -> None:
        self._group, self._step = group, step
        self._named = Group(group.group_name, group.size())
        self._roots = [root for root in shared if not _communicates(root)]
        theirs = _averaged_by_others(call)
        self._parameters = [p for p in _trained(call) if id(p) not in theirs]
        self._positions = {id(p): index for index, p in enumerate(self._parameters)}
        self._known = theirs.union(self._positions)
        self._ready: set[int] = set()
        self._queued = False

    @contextmanager
    def active(self, buffers: bool) -> Iterator[None]:
        """While active, every backward ends by averaging gradients over the ranks.

        Args:
            buffers: before each forward of a module, copy its buffers from the group's rank 0.
        """
        with ExitStack() as stack:
            for handle in self._hooks(buffers):
                stack.callback(handle.remove)
            yield

    def _hooks(self, buffers: bool) -> Iterator[RemovableHandle]:
        for parameter in self._parameters:
            yield parameter.register_post_accumulate_grad_hook(self._accumulated)
        yield register_optimizer_step_pre_hook(self._check_step)
        if buffers:
            for root in self._roots:
                yield root.register_forward_pre_hook(self._receive, prepend=True)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._ready.add(self._positions[id(parameter)])
        if not self._queued:
            self._queued = True
            after_backward(self._average)

    def _average(self) -> None:
        """Averages the gradients that any rank has received since the last average."""
        self._queued = False
        ready, self._ready = self._ready, set()
        explained = sending_explained(self._group, self._step, "all_reduce", "gradients")
        with torch.no_grad(), explained:
            for index in self._received_by_anyone(ready):
                self._average_one(self._parameters[index])

    def _received_by_anyone(self, ready: set[int]) -> list[int]:
        marks = [index in ready for index in range(len(self._parameters))]
        anywhere = torch.tensor(marks, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
        return [index for index, mark in enumerate(anywhere.tolist()) if mark]

    def _average_one(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            parameter.grad.mul_(1.0 / self._named.ranks)
            dist.all_reduce(parameter.grad, group=self._group)
        else:
            parameter.grad.copy_(average(parameter.grad, self._named))

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        if is_in_backward():
            raise GraphOptError(
                f"{type(optimizer).__name__}.step() runs within the backward, where gradients are"
                " not averaged over the ranks yet\n"
                "  hint:  call optimizer.step() after backward()"
            )
        if any(p.requires_grad and id(p) not in self._known for p in updated):
            raise GraphOptError(
                f"{type(optimizer).__name__}.step() updates parameters that are not among the"
                " step's arguments, so that nobody averages their gradients over the ranks\n"
                "  hint:  pass the module or the optimizer that has them to the step"
            )

    def _receive(self, module: nn.Module, args: Any) -> None:
        explained = sending_explained(self._group, self._step, "broadcast", "buffers")
        with torch.no_grad(), explained:
            broadcast_buffers(module, group_of_buffers(self._group))


def _communicates(module: nn.Module) -> bool:
    """True if a module averages its own gradients, as DDP and FSDP do."""
    return isinstance(module, DistributedDataParallel) or _compat.is_fsdp(module)


def averaged_by_fsdp(call: Call) -> bool:
    """True if the modules of a call have parameters, and FSDP manages all of them."""
    modules = [module for _, module in call.named_submodules() if _compat.is_fsdp(module)]
    theirs = {id(parameter) for module in modules for parameter in module.parameters()}
    return bool(theirs) and all(id(parameter) in theirs for parameter in _trained(call))


def _averaged_by_others(call: Call) -> set[int]:
    """The ids of the parameters whose modules average them."""
    modules = (module for _, module in call.named_submodules() if _communicates(module))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _trained(call: Call) -> list[nn.Parameter]:
    """The distinct parameters that get gradients, in an order that all ranks share."""
    found: dict[int, nn.Parameter] = {}
    for _, module in call.named_submodules():
        found.update((id(p), p) for p in module.parameters(recurse=False))
    for optimizer in call.optimizer_objects():
        found.update((id(p), p) for group in optimizer.param_groups for p in group["params"])
    return [p for p in found.values() if p.requires_grad]
