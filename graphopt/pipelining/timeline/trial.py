"""Steps of a pipe under a schedule of torch, on made-up data, to be recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphopt.errors import ScheduleError
from graphopt.graph_utils import tensors_in
from graphopt.pipelining.pipe.pipe import Pipe
from graphopt.pipelining.timeline.durations import example_inputs, total
from graphopt.pipelining.timeline.orders import ScheduleKind


class Trial:
    """A pipe's stages of this rank, in a schedule.

    The arguments are those that `measure_durations` uses, and so is the loss of a pipe that has
    none. All ranks of the default group take part.

    Attributes:
        schedule: of torch.

    Raises:
        ScheduleError: stages, ranks or microbatches do not fit the schedule, or an argument of the
            model cannot be divided into microbatches.
    """

    def __init__(self, pipe: Pipe, kind: ScheduleKind, microbatches: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        indices = kind.stages_of(rank, ranks, pipe.num_stages)
        self._stages = [pipe.build_stage(index, "cpu") for index in indices]
        loss_fn = pipe.loss_fn if pipe.has_loss_and_backward else _sum_of_output
        self.schedule = kind.make(self._stages, microbatches, loss_fn=loss_fn)
        self._args, self._kwargs = _batch(pipe, microbatches) if rank == 0 else ((), {})
        self._target = torch.zeros(microbatches)

    def step(self) -> None:
        """Forward and backward of all microbatches. Gradients do not stay."""
        last = any(stage.is_last for stage in self._stages)
        target = {"target": self._target} if last else {}
        self.schedule.step(*self._args, **self._kwargs, **target)
        for stage in self._stages:
            stage.submod.zero_grad()


def _batch(pipe: Pipe, microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model for all microbatches, which are alike."""
    return pipe.calling.nest(
        _repeated(value, microbatches) for value in example_inputs(pipe, "cpu")
    )


def _repeated(value: Tensor, microbatches: int) -> Tensor:
    if value.ndim == 0:
        raise ScheduleError(
            "an argument of the model has no dimensions: torch's schedules cannot divide it into"
            " microbatches; make it a number or a buffer"
        )
    return torch.cat([value] * microbatches)


def _sum_of_output(output: Any, target: Tensor) -> Tensor:
    return total(list(tensors_in(output)))
