"""How a training step communicates: over which ranks, whether gradients are averaged, how the ranks
agree on its graphs, and how they learn that one has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from graphopt.errors import CaptureError
from graphopt.parallel import OverRanks, Parallel, ZeRO, resolve
from graphopt.ranks.processes import announce

if TYPE_CHECKING:
    from torch import nn

    from graphopt.runtime.agreed import Agreed, Others, Ranks
    from graphopt.runtime.joint_capture import JointCapture
    from graphopt.runtime.sharded_models import ShardedModels
    from graphopt.tracing.call import Call


class Communication:
    """How one training step communicates.

    Args:
        fn: the step.
        parallel: as given to `graphopt.compile`.

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
        """Whether the step does all communication itself, if it does any."""
        return not isinstance(resolve(self._parallel), OverRanks)

    def mode(self) -> tuple[Any, ...]:
        """How a call communicates now: part of what a graph is specialized on."""
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
        """While active, a failure is told to ranks that run their step meanwhile. Gives how this
        rank communicates.

        Args:
            step: which call of the training step it is, counted from 1.
        """
        from graphopt.ranks.failures import tell

        parallel = resolve(self._parallel)
        try:
            yield parallel
        except BaseException as error:
            if isinstance(parallel, OverRanks):
                tell(parallel.everyone, step, error)
            raise

    def shard(self, call: Call) -> bool:
        """Let this rank keep what is its own of what a call has whole, and this kind shards.
        Returns whether anything has changed."""
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
        """The models that the step shards; None of other kinds."""
        parallel = resolve(self._parallel)
        if not isinstance(parallel, ZeRO):
            return None
        if self._sharded_models is None:
            from graphopt.runtime.sharded_models import ShardedModels

            self._sharded_models = ShardedModels(self._topic, parallel)
        return self._sharded_models

    @contextmanager
    def shards_admitted(self) -> Iterator[None]:
        """While active, a call may be captured with what this kind has sharded."""
        from graphopt.tracing.ranks.admitted_shards import admitted

        parallel = resolve(self._parallel)
        if not isinstance(parallel, OverRanks):
            yield
            return
        with admitted(parallel.axes):
            yield

    def ways(self, call: Call, mode: tuple[Any, ...], others: Others) -> Iterable[Ranks]:
        """How this rank may come to agree with others on a new graph.

        Args:
            others: what they do meanwhile.
        """
        from graphopt.runtime.agreed import Ranks

        parallel = resolve(self._parallel)
        if isinstance(parallel, OverRanks):
            return self._joint().ways(call, parallel, self.averaging, mode, others)
        return [Ranks()]

    def vote(self, call: Call, mode: tuple[Any, ...], step: int) -> Callable[[int], bool] | None:
        """How all ranks say whether they have a graph for a call; see `Others.vote`."""
        found = self._joint_capture and self._joint_capture.asking(call, mode)
        return partial(found.alike, step=step) if found else None

    def run_elsewhere(self, call: Call) -> list[Agreed]:
        """What the graphs stand on that other ranks may run for a call, where this rank may leave
        them."""
        joint = self._joint_capture
        return [] if joint is None else joint.run_elsewhere(call, self.mode())

    def join(self, call: Call, parallel: OverRanks) -> list[nn.Module]:
        """Make all ranks start from the same values, once for each module, in a call that runs
        eagerly. Returns the modules that all ranks have."""
        return self._joint().join_eagerly(call, parallel)

    @property
    def alone(self) -> bool:
        """Whether other ranks may go on with a graph while this one has none."""
        return self._joint_capture is not None and self._joint_capture.alone

    def forget(self) -> None:
        """Let the ranks agree anew."""
        self._joint_capture = None

    def forget_dead(self) -> None:
        """Forget what concerns models that have been freed."""
        if self._joint_capture is not None:
            self._joint_capture.forget_dead()

    def _joint(self) -> JointCapture:
        if self._joint_capture is None:
            from graphopt.runtime.joint_capture import JointCapture

            self._joint_capture = JointCapture(self._topic)
        return self._joint_capture

    @property
    def _topic(self) -> str:
        """The name of the step, by which ranks find one another."""
        function = self._fn
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{function.__module__}.{name}"
