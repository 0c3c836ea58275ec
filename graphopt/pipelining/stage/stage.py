"""Pipeline stages for the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from graphopt.pipelining.stage.compilable import CompilableStage
from graphopt.pipelining.stage.hand_cut import HandCut


class Stage(CompilableStage):
    """A pipeline stage, made by `Pipe.build_stage`, `build_stage` or `Stage.from_module`.

    The rank of the first stage calls `schedule.step` with the model's arguments, positional and
    keyword; the others without, and the last with `target=` when the schedule has a loss function.
    What later stages read of them is passed on from stage to stage. The last stage returns what the
    model returns; tensors without dimensions, such as a loss, come back from `step` as one entry
    per microbatch.

    Attributes:
        submod: the module; its parameters and buffers have the model's names.
        replicas: the parameters that this and other stages hold.

    >>> import torch.distributed as dist
    >>> from graphopt.pipelining import Stage
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> module = torch.nn.Linear(4, 2)
    >>> stage = Stage.from_module(module, 1, 2, "cpu", input_args=(torch.ones(2, 4),))
    >>> stage.is_last, stage.submod is not None
    (True, True)
    >>> dist.destroy_process_group()
    """

    @staticmethod
    def from_module(
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device | str,
        *,
        input_args: torch.Tensor | Sequence[torch.Tensor],
        output_args: torch.Tensor | Sequence[torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Stage:
        """Makes a stage of a module that was cut from a model by hand.

        Its parameters and buffers are moved to `device`. What it returns are the positional
        arguments of the next one: a tensor or a tuple of tensors; the last stage may return any
        nest. Keyword arguments of `schedule.step` on a rank go to all stages of that rank. Between
        stages, all floating-point tensors carry gradients.

        Args:
            module: the stage's module, which runs unchanged.
            index, num_stages: the index of the stage, and the number of stages.
            input_args: example of what it receives for one microbatch, a tensor or several; values
                do not matter.
            output_args: example of what it returns, compared with what it does on fake tensors;
                needed where it does not run on those.

        Raises:
            PartitionError: an argument is of another kind, the module does not run on
                `input_args`, or returns something else than `output_args`.
        """
        return HandCutStage(
            module, index, num_stages, torch.device(device), input_args, output_args, group
        )


class HandCutStage(HandCut, Stage):
    """A stage whose module was divided from a model by hand; `Stage.from_module` makes it."""
