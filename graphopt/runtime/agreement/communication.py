"""Communication of a training step: its ranks, averages, agreements on graphs, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.parallel import OverRanks, Parallel, ZeRO, resolve
from graphopt.ranks.failure_reports import tell
from graphopt.ranks.processes import announce
from graphopt.runtime.agreement.agreed import CallCapture, OtherRanks
from graphopt.runtime.agreement.joint_capture import JointCapture
from graphopt.runtime.agreement.sharded_models import ShardedModels
from graphopt.tracing.call import Call
from graphopt.tracing.ranks.admitted_shards import admitted


class Communication:
    """The communication of one training step.

    Args:
        fn: the step.
        parallel: the option of `graphopt.compile`.

    Attributes:
        joint: the agreements of the ranks, and the captures that they make together.
        averaging: gradients are averaged over the ranks; not so within `no_sync`.
    """

    def __init__(self, fn: Callable[..., Any], parallel: Parallel | None) -> None:
        self._parallel, self._topic = parallel, _topic_of(fn)
        self.averaging = True
        self._sharded_models: ShardedModels | None = None
        self.forget()
        if parallel is None or isinstance(parallel, OverRanks):
            announce(parallel)

    def mode(self) -> tuple[Any, ...]:
        """The mode of communication of a call, which a graph is specialized on."""
        together = _compat.in_process_group()
        parallel = resolve(self._parallel) if together or self._parallel is not None else None
        if not isinstance(parallel, OverRanks):
            return "own communication", dist.get_world_size() if together else 1
        group, names = parallel.everyone, [axis.group_name for axis in parallel.axes]
        return ("averaged" if self.averaging else "no_sync", group.group_name, group.size(), *names)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While active, gradients stay local to the rank."""
        before, self.averaging = self.averaging, False
        try:
            yield
        finally:
            self.averaging = before

    @contextmanager
    def failures_told(self, step: int) -> Iterator[Parallel]:
        """While active, a failure is told to other ranks in their step. Yields the kind of
        parallelism.

        Args:
            step: the number of the training step's call, counted from 1.
        """
        parallel = resolve(self._parallel)
        try:
            yield parallel
        except BaseException as error:
            if isinstance(parallel, OverRanks):
                tell(parallel.everyone, step, error)
            raise

    def shard(self, call: Call) -> bool:
        """Shards the tensors of a call that are still whole; True if any was."""
        sharded = self.sharded_models
        if sharded is not None and not self.averaging and sharded.has_parameters:
            raise CaptureError(
                "no_sync() with ZeRO(stage=3): no rank has whole parameters to keep gradients for",
                hint="accumulate within one call of the step, with several backwards before"
                " optimizer.step(), or use stage=1",
            )
        return sharded is not None and sharded.shard(call)

    @property
    def sharded_models(self) -> ShardedModels | None:
        """The models that the step shards, or None for kinds that shard none."""
        parallel = resolve(self._parallel)
        if not isinstance(parallel, ZeRO):
            return None
        if self._sharded_models is None:
            self._sharded_models = ShardedModels(self._topic, parallel)
        return self._sharded_models

    def shards_admitted(self) -> AbstractContextManager[None]:
        """While active, a call that uses tensors sharded by this kind may be captured."""
        parallel = resolve(self._parallel)
        return admitted(parallel.axes if isinstance(parallel, OverRanks) else ())

    def ways(self, call: Call, mode: tuple[Any, ...], others: OtherRanks) -> Iterable[CallCapture]:
        """The ways in which this rank may agree with others on a new graph.

        Args:
            others: the state of the other ranks meanwhile.
        """
        parallel = resolve(self._parallel)
        if not isinstance(parallel, OverRanks):
            return [CallCapture()]
        self.joint.sharded_models = self.sharded_models
        return self.joint.ways(call, parallel, self.averaging, mode, others)

    def forget(self) -> None:
        """Drops all agreements, so that the ranks agree again."""
        self.joint = JointCapture(self._topic)


def _topic_of(function: Callable[..., Any]) -> str:
    """The name of a step, by which ranks find one another."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"
