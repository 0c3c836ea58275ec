"""One rank of a training in which something goes wrong on one rank, as a process of its own.

What goes wrong in user code does so in user code; what goes wrong at an exact place of a capture or
of a running step is put there by exchanging a function or a line of the graph.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim import SGD, Optimizer

import graphopt
from graphopt.graph_utils import find_nodes, is_collective
from graphopt.runtime.agreement import joint_capture as _joint
from graphopt.runtime.agreement import joint_traces as _traces

WORLD = 3
STEPS = 4
AGREE_SECONDS = 10.0
COLLECTIVE_SECONDS = 10.0

KINDS = (
    "short delay",
    "long delay",
    "exception",
    "interrupt",
    "exit",
    "kill",
    "terminate",
    "destroy",
)
PHASES = (
    "before capture",
    "forward",
    "backward",
    "trace 1",
    "trace 2",
    "agreed",
    "between steps",
    "between collectives",
    "flush",
)
FROM_THE_START = ("another model", "another branch", "never calls")
"""Kinds that have no phase."""
STORES = ("file", "rank 0", "agent")


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: one of `KINDS` or `FROM_THE_START`, or "none".
        phase: when, one of `PHASES`.
        rank: where.
        store: which store the ranks meet in: a file, one that rank 0 hosts, or one that the
            process hosts which has started the ranks, as torchrun does.
        pipeline: of the training.
        retries: how often each rank calls the step again after an error.
        agree: seconds to wait for other ranks at a capture.
    """

    kind: str
    phase: str = "before capture"
    rank: int = 1
    store: str = "file"
    pipeline: str = "default"
    retries: int = 0
    agree: float = AGREE_SECONDS


class Trouble:
    """Lets this rank fail once, in the phase of the fault."""

    def __init__(self, fault: Fault, here: bool, answer: Connection) -> None:
        self.kind = fault.kind if here else "none"
        self.phase = fault.phase
        self._answer = answer
        self._over = False

    def at(self, phase: str) -> None:
        """Fail, if this is the phase."""
        if phase != self.phase or self.kind not in KINDS or self._over:
            return
        self._over = True
        self.note()
        _FAILURES[self.kind]()

    def note(self) -> None:
        """Tell the test when it began."""
        self._answer.send(("began", time.time()))


def _raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


_FAILURES: dict[str, Callable[[], None]] = {
    "short delay": lambda: time.sleep(0.5),
    "long delay": lambda: time.sleep(1.3 * AGREE_SECONDS),
    "exception": _raising(LookupError("no such example")),
    "interrupt": _raising(KeyboardInterrupt()),
    "exit": _raising(SystemExit(3)),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "destroy": dist.destroy_process_group,
}


def serve(rank: int, fault: Fault, place: str, answer: Connection) -> None:
    """What the process of a rank runs. Sends ``("began", time)`` where something goes wrong here,
    and then how the training ended: ``("done", losses)`` or ``("error", type, graphopt's, text,
    time)``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    store = _store(fault.store, place, rank)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    trouble = Trouble(fault, rank == fault.rank, answer)
    try:
        answer.send(("done", _train(rank, fault, trouble)))
    except BaseException as error:
        ours = isinstance(error, graphopt.GraphOptError)
        answer.send(("error", type(error).__name__, ours, str(error), time.time()))


def _store(kind: str, place: str, rank: int) -> dist.Store:
    if kind == "file":
        return dist.FileStore(place, WORLD)
    host, port = place.split(":")
    hosts = kind == "rank 0" and rank == 0
    store = dist.TCPStore(host, int(port), WORLD, hosts, timedelta(seconds=60))
    return dist.PrefixStore("/worker/attempt_0", store)


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def other_branch(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss = loss + model[0].bias.sum() if dist.get_rank() == 0 else loss
    return loss.detach()


other_branch.__qualname__ = train_step.__qualname__  # the same step, so that the ranks meet


class Net(nn.Sequential):
    """Two layers, whose forward and backward fail where they are to."""

    def __init__(self, width: int, trouble: Trouble) -> None:
        super().__init__(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))
        if trouble.phase == "forward" and trouble.kind in KINDS:
            self.register_forward_hook(lambda *args: trouble.at("forward"))
        if trouble.phase == "backward" and trouble.kind in KINDS:
            self[0].weight.register_hook(lambda gradient: trouble.at("backward"))


def _train(rank: int, fault: Fault, trouble: Trouble) -> list[float]:
    if trouble.kind in FROM_THE_START:
        trouble.note()
    if trouble.kind == "never calls":
        time.sleep(1.3 * AGREE_SECONDS)
        return []
    torch.manual_seed(0)
    model = Net(12 if trouble.kind == "another model" else 8, trouble)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = graphopt.compile(
        other_branch if trouble.kind == "another branch" else train_step,
        pipeline=fault.pipeline,
        parallel=graphopt.DataParallel(timeout=fault.agree),
    )
    _exchange_functions(trouble)
    inputs = [torch.randn(4, 6, generator=_seeded(10 * i + rank)) for i in range(STEPS)]
    losses = []
    for number, x in enumerate(inputs):
        trouble.at("before capture" if number == 0 else "between steps")
        call = functools.partial(step, model, optimizer, x)
        losses.append(float(_with_retries(call, fault.retries)))
        if number == 1 and trouble.phase == "between collectives" and trouble.kind in KINDS:
            _fail_between_collectives(step, trouble)
    trouble.at("flush")
    step.flush()
    return losses


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _with_retries(call: Callable[[], Tensor], retries: int) -> Tensor:
    for _ in range(retries):
        try:
            return call()
        except (graphopt.GraphOptError, KeyboardInterrupt):
            pass
    return call()


def _exchange_functions(trouble: Trouble) -> None:
    """Let a rank fail while it traces, before and after the first exchange, or once all agree."""

    def exchange(holder: Any, name: str, phase: str) -> None:
        original = getattr(holder, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            trouble.at(phase)
            return original(*args, **kwargs)

        setattr(holder, name, failing)

    exchange(_traces, "trace_from_state", "trace 1")
    exchange(_traces, "finish", "trace 2")
    exchange(_joint.JointCapture, "join", "agreed")


def _fail_between_collectives(step: graphopt.TrainStep, trouble: Trouble) -> None:
    """Let the graphs of a step fail after the launch of their first collective."""
    for program in step.graph_module._programs.values():
        graph_module: fx.GraphModule = program._graph_module
        launches = find_nodes(graph_module.graph, is_collective)
        if launches:
            with graph_module.graph.inserting_after(launches[0]):
                graph_module.graph.call_function(trouble.at, ("between collectives",))
            graph_module.recompile()
            program._call = graph_module.forward
