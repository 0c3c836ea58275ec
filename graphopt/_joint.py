"""Capture on several ranks: every rank traces alone, then all agree before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _compat
from graphopt.errors import GraphOptError, SpmdMismatchError
from graphopt.parallel import DataParallel
from graphopt.spmd import Channel, check_same, collective_plan, merged_order
from graphopt.tracing.call import Call
from graphopt.tracing.capture import CapturedStep, communication_for, finish, prepare
from graphopt.tracing.guards import Guards
from graphopt.tracing.inputs import Inputs
from graphopt.tracing.trace import RawTrace, trace

T = TypeVar("T")


@dataclass
class Agreed:
    """What all ranks decided for one structure of the step.

    Attributes:
        guards: recognise the structure again.
        order: parameters whose gradients are averaged, in launch order.
        plan: every collective, one line each.
    """

    guards: Guards
    order: tuple[str, ...]
    plan: list[str]


class JointCapture:
    """Captures one step function on the ranks of one group.

    The first capture of a structure (modules, modes, flags) is agreed on by all ranks. A later one
    that differs only in shapes or numbers may happen on one rank alone (an uneven last batch), and
    has to give the plan agreed before.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._agreed: list[Agreed] = []
        self._joined: WeakSet[nn.Module] = WeakSet()

    def capture(
        self, call: Call, parallel: DataParallel, sync: bool, mode: tuple[Any, ...]
    ) -> CapturedStep:
        for agreed in self._agreed:
            if agreed.guards.structure_mismatch(call, mode) is None:
                return _as_agreed(call, parallel, agreed)
        joined = all(root in self._joined for _, root in call.named_roots())
        if joined and not sync:
            inputs = prepare(call)
            return finish(call, inputs, None, trace(call, inputs, None))
        group = _compat.group_or_default(parallel.group)
        channel = Channel(group, self._topic, parallel.timeout)
        captured, agreed = self._agree(channel, call, parallel, sync, mode)
        if sync:
            self._agreed.append(agreed)
        if not joined:
            self._join(call, parallel, group)
        return captured

    def _agree(
        self, channel: Channel, call: Call, parallel: DataParallel, sync: bool, mode: tuple[Any, ...]
    ) -> tuple[CapturedStep, Agreed]:
        alone = communication_for(parallel) if sync else None

        def first() -> tuple[Inputs, RawTrace]:
            inputs = prepare(call)
            return inputs, trace(call, inputs, alone)

        inputs, raw = _or_tell(channel, first)
        mine = {"sync": [f"averaging {sync}"], "tensors": _describe(inputs), "used": raw.used}
        everyone = channel.exchange(mine)
        check_same("communication mode", [theirs["sync"] for theirs in everyone])
        check_same("parameters or buffers", [theirs["tensors"] for theirs in everyone])
        order = merged_order([theirs["used"] for theirs in everyone])
        communication = communication_for(parallel, order) if sync else None

        def second() -> CapturedStep:
            again = raw if order == raw.used else trace(call, inputs, communication)
            return finish(call, inputs, communication, again)

        captured = _or_tell(channel, second)
        plan = collective_plan(captured.graph_module.graph)
        plans = [theirs["plan"] for theirs in channel.exchange({"plan": plan})]
        check_same("collectives", plans)
        return captured, Agreed(Guards(call, inputs, mode), order, plan)

    def _join(self, call: Call, parallel: DataParallel, group: dist.ProcessGroup) -> None:
        """What DDP does when it is constructed: everybody starts from rank 0's values."""
        for _, root in call.named_roots():
            if parallel.broadcast:
                _broadcast(root, group)
            self._joined.add(root)


def _as_agreed(call: Call, parallel: DataParallel, agreed: Agreed) -> CapturedStep:
    inputs = prepare(call)
    communication = communication_for(parallel, agreed.order)
    captured = finish(call, inputs, communication, trace(call, inputs, communication))
    plan = collective_plan(captured.graph_module.graph)
    if plan != agreed.plan:
        pairs = zip([*plan, "nothing"], [*agreed.plan, "nothing"], strict=False)
        new, old = next((a, b) for a, b in pairs if a != b)
        raise SpmdMismatchError(
            "captured again on this rank, the step plans other collectives than all ranks agreed"
            f" on at the first capture:\n  agreed:  {old}\n  now:     {new}\n"
            "  hint:  let what decides it be a bool or str argument, or a mode of the model, that"
            " changes on all ranks alike"
        )
    return captured


def _or_tell(channel: Channel, work: Callable[[], T]) -> T:
    """Run `work`; if it fails, the other ranks learn why instead of waiting."""
    try:
        return work()
    except GraphOptError as error:
        channel.give_up(str(error))
        raise


def _describe(inputs: Inputs) -> list[str]:
    return [
        f"{entry.kind} {entry.fqn} {entry.tensor.dtype} {list(entry.tensor.shape)}"
        for entry in inputs.module_tensors
    ]


def _broadcast(module: nn.Module, group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            flat = tensor.detach().contiguous()
            dist.broadcast(flat, source, group=group)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
