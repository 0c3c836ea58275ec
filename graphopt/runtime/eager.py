"""Eager execution of steps, on request or because they cannot be captured."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import nullcontext
from typing import Any

import torch

from graphopt import _compat
from graphopt.errors import CaptureError, GraphOptError, PipelineSyntaxError, SpmdMismatchError
from graphopt.parallel import DataParallel, OverRanks, Parallel
from graphopt.runtime.agreement.communication import Communication
from graphopt.runtime.agreement.eager_averages import Averages, averaged_by_fsdp
from graphopt.tracing.call import Call
from graphopt.tracing.inputs.implicit import ImplicitInputs
from graphopt.tracing.rollback.reachable import trained_objects

logger = logging.getLogger("graphopt")

OFF = "GRAPHOPT_OFF"


class Fallback:
    """The decision that a step runs eagerly, with the reason.

    Args:
        name: the name of the step, for messages.
        mode: None, or ``"eager"``: a step that cannot be captured runs eagerly.
        communication: that of the step.

    Raises:
        ValueError: there is no such mode.
        PipelineSyntaxError: `GRAPHOPT_OFF` is neither 0 nor 1.
    """

    def __init__(self, name: str, mode: str | None, communication: Communication) -> None:
        if mode not in (None, "eager"):
            raise ValueError(f"fallback={mode!r}: None or 'eager' is expected")
        self._name, self._mode, self._communication = name, mode, communication
        self._off = _is_off()
        self.refusal: GraphOptError | None = None
        self._trained: ImplicitInputs | None = None
        self._watching: set[str] = set()
        if self._off:
            logger.warning("%s runs eagerly: %s is set", name, OFF)

    @property
    def active(self) -> bool:
        """True if the step runs eagerly."""
        return self._off or self.refusal is not None

    @property
    def reason(self) -> str:
        """The reason why the step runs eagerly."""
        return f"{OFF} is set" if self._off else str(self.refusal)

    def take(self, error: BaseException, call: Call, parallel: Parallel, alone: bool) -> bool:
        """Decides on an error if the step runs eagerly from now on, and warns if so.

        Args:
            alone: whether other ranks may go on with a graph meanwhile.
        """
        if self._mode is None or not isinstance(error, (CaptureError, SpmdMismatchError)):
            return False
        if isinstance(error, SpmdMismatchError) and not error.refused:
            return False
        if alone or not self._can_average(call, parallel):
            return False
        self.refusal = error
        logger.warning("%s runs eagerly from now on, until reset(): %s", self._name, error)
        return True

    def warn_of(self, watching: str) -> None:
        """Warns once that calls run eagerly because of a mode or hook that watches them."""
        if watching not in self._watching:
            self._watching.add(watching)
            logger.warning("%s runs eagerly where it is called with %s", self._name, watching)

    def forget(self) -> None:
        """Lets the next call be captured, unless capture is turned off."""
        self.refusal = None

    def run(self, call: Call, step: int) -> Any:
        """Runs the function with DDP's averages; its results have no autograd history.

        Args:
            step: the number of the step's call, counted from 1.

        Raises:
            CaptureError: nothing among the arguments says what to average.
            CollectiveError: another rank has failed.
            SpmdMismatchError: other ranks have other modules that are trained.
        """
        args, kwargs = call.rebuild(call.leaves)
        with self._communication.failures_told(step) as parallel:
            averaging: Any = nullcontext()
            if isinstance(parallel, OverRanks) and not averaged_by_fsdp(call):
                averaging = self._averaging(call, parallel, step)
            with averaging:
                returned = call.fn(*args, **kwargs)
            return _compat.tree_map(_without_history, returned)

    def _averaging(self, call: Call, parallel: OverRanks, step: int) -> Any:
        if not isinstance(parallel, DataParallel):
            raise CaptureError(
                f"it runs eagerly, and what {type(parallel).__name__} does to a graph is not done"
                " then",
                hint="let it be captured: GRAPHOPT_OFF=0, and no fallback",
            )
        if not self._can_average(call, parallel):
            raise CaptureError(
                "it runs eagerly, and has and reaches no module or optimizer whose gradients the"
                " ranks could average",
                hint="pass the model and the optimizer to the step",
            )
        call, group = self._with_trained(call), parallel.everyone
        shared = self._communication.joint.join_eagerly(call, parallel)
        if not self._communication.averaging or group.size() == 1:
            return nullcontext()
        return Averages(call, group, step, shared).active(parallel.broadcast_buffers)

    def _can_average(self, call: Call, parallel: Parallel) -> bool:
        """True if a step may run eagerly: on one rank, or if its gradients can be averaged."""
        if not isinstance(parallel, OverRanks) or averaged_by_fsdp(call):
            return True
        found = isinstance(parallel, DataParallel) and self._with_trained(call)
        return bool(found and (found.modules or found.optimizers))

    def _with_trained(self, call: Call) -> Call:
        """The call with the modules and optimizers of the step's closure, if its arguments have
        none."""
        if call.modules or call.optimizers:
            return call
        found = None if self._trained is None else call.using(self._trained)
        if found is None:
            objects = enumerate(trained_objects(call.fn, call.leaves))
            named = [(f"trained.{i}", weakref.ref(each)) for i, each in objects]
            self._trained = ImplicitInputs(named)
            found = call.using(self._trained)
        return found or call


def _without_history(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach()
    return value


def _is_off() -> bool:
    value = os.environ.get(OFF, "")
    if value not in ("", "0", "1"):
        raise PipelineSyntaxError(f"{OFF}={value!r}: 1 turns graphopt off, 0 leaves it on")
    return value == "1"
