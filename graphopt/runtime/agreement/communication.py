"""Communication of a training step: its ranks, averages, agreements on graphs, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.parallel import OverRanks, Parallel, ZeRO, resolve
from graphopt.ranks.processes import announce

if TYPE_CHECKING:
    from torch import nn

    from graphopt.runtime.agreement.agreed import CallCapture, OtherRanks, RankAgreement
    from graphopt.runtime.agreement.joint_capture import JointCapture
    from graphopt.runtime.agreement.sharded_models import ShardedModels
    from graphopt.tracing.call import Call


_ALONE = "own communication", 1
"""The mode of a process without others."""


class Communication:
    """The communication of one training step.

    Args:
        fn: the step.
        parallel: the option of `graphopt.compile`.

    Attributes:
        averaging: gradients are averaged over the ranks; not so within `no_sync`.
    """

    def __init__(self, fn: Callable[..., Any], parallel: Parallel | None) -> None:
        self._fn, self._parallel = fn, parallel
        self.averaging = True
        self._joint_capture: JointCapture | None = None
        self._sharded_models: ShardedModels | None = None
        if parallel is None or isinstance(parallel, OverRanks):
            announce(parallel)

    @property
    def is_own(self) -> bool:
        """True if the step itself does all communication, if there is any."""
        return not isinstance(resolve(self._parallel), OverRanks)

    def mode(self) -> tuple[Any, ...]:
        """The mode of communication of a call, which a graph is specialized on."""
        if self._parallel is None and not _compat.in_process_group():
            return _ALONE
        parallel = resolve(self._parallel)
        if not isinstance(parallel, OverRanks):
            ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            return ("own communication", ranks)
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
        from graphopt.ranks.failure_reports import tell

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
            from graphopt.runtime.agreement.sharded_models import ShardedModels

            self._sharded_models = ShardedModels(self._topic, parallel)
        return self._sharded_models

    @contextmanager
    def shards_admitted(self) -> Iterator[None]:
        """While active, a call that uses tensors sharded by this kind may be captured."""
        from graphopt.tracing.ranks.admitted_shards import admitted

        parallel = resolve(self._parallel)
        if not isinstance(parallel, OverRanks):
            yield
            return
        with admitted(parallel.axes):
            yield

    def ways(self, call: Call, mode: tuple[Any, ...], others: OtherRanks) -> Iterable[CallCapture]:
        """The ways in which this rank may agree with others on a new graph.

        Args:
            others: the state of the other ranks meanwhile.
        """
        from graphopt.runtime.agreement.agreed import CallCapture

        parallel = resolve(self._parallel)
        if isinstance(parallel, OverRanks):
            return self._joint().ways(call, parallel, self.averaging, mode, others)
        return [CallCapture()]

    def vote(self, call: Call, mode: tuple[Any, ...], step: int) -> Callable[[int], bool] | None:
        """The vote of all ranks on having a graph for a call; see `OtherRanks.vote`."""
        found = self._joint_capture and self._joint_capture.asking(call, mode)
        return partial(found.alike, step=step) if found else None

    def run_elsewhere(self, call: Call) -> list[RankAgreement]:
        """The agreement whose graphs other ranks may run for a call that this rank may leave, or
        None."""
        joint = self._joint_capture
        return [] if joint is None else joint.run_elsewhere(call, self.mode())

    def join(self, call: Call, parallel: OverRanks) -> list[nn.Module]:
        """Broadcasts initial values in an eager call, once for each module; returns the modules
        that all ranks have."""
        return self._joint().join_eagerly(call, parallel)

    @property
    def alone(self) -> bool:
        """True if other ranks may continue with a graph while this rank has none."""
        return self._joint_capture is not None and self._joint_capture.alone

    def forget(self) -> None:
        """Drops all agreements, so that the ranks agree again."""
        self._joint_capture = None

    def forget_dead(self) -> None:
        """Drops agreements on models that have been freed."""
        if self._joint_capture is not None:
            self._joint_capture.forget_dead()

    def _joint(self) -> JointCapture:
        if self._joint_capture is None:
            from graphopt.runtime.agreement.joint_capture import JointCapture

            self._joint_capture = JointCapture(self._topic, sharded_models=self.sharded_models)
        return self._joint_capture

    @property
    def _topic(self) -> str:
        """The name of the step, by which ranks find one another."""
        function = self._fn
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{function.__module__}.{name}"
