"""A stage as the schedules of `torch.distributed.pipelining` run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.pipelining import PipelineStage

from graphopt.pipelining.calling import Calling, OutputSpec
from graphopt.pipelining.chain import weights_meet_inputs
from graphopt.pipelining.metadata import Flow
from graphopt.pipelining.sharing import Replica


@dataclass(frozen=True)
class OutputNest:
    """How the tensors that the last stage returns become the model's output.

    Attributes:
        leaves: for each leaf of the output the position of its tensor; or the constant that it is.
        spec: how the leaves are nested.
    """

    leaves: tuple[tuple[int] | tuple[None, Any], ...]
    spec: OutputSpec

    def nest(self, tensors: tuple[torch.Tensor, ...], *, per_chunk: bool = False) -> Any:
        """The output; `per_chunk`: tensors without dimensions get one, to be concatenated."""
        values = [
            leaf[1] if len(leaf) == 2 else _chunk(tensors[leaf[0]], per_chunk)
            for leaf in self.leaves
        ]
        return self.spec.nest(values)


class Stage(PipelineStage):
    """One stage of a pipe, made by `Pipe.build_stage`.

    The rank of the first stage calls `schedule.step` with the model's arguments, positional and
    keyword; the others without, and the last with `target=` when the schedule has a loss function.
    What later stages read of them is passed on from stage to stage. The last stage returns what the
    model returns; tensors without dimensions, such as a loss, come back from `step` as one entry
    per microbatch.

    Attributes:
        submod: the module; its parameters and buffers have the model's names.
        replicas: the parameters that this and other stages hold.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        stage_index: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        flow: Flow,
        calling: Calling,
        output: OutputNest,
        replicas: list[Replica],
    ) -> None:
        received, sent = flow.received[stage_index], flow.sent(stage_index)
        # The first stage is not divided anyway.
        divides = stage_index == 0 or weights_meet_inputs(module.graph, received, sent)
        super().__init__(
            module,
            stage_index,
            len(flow.received),
            device,
            input_args=received,
            output_args=sent,
            group=group,
            dw_builder=None if divides else lambda: _nothing_left,
        )
        self.replicas = [r for r in replicas if stage_index in dict(r.holders)]
        self._calling = calling
        self._expected = flow.received[0]
        self._output = output

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one microbatch: what a schedule calls."""
        flat = self._flat(args, kwargs or {}) if self.is_first else args
        # Schedules give every stage of the first rank the model's keyword arguments.
        sent = super().forward_one_chunk(fwd_chunk_id, flat, {}, save_forward_output)
        if not self.is_last:
            return sent
        if save_forward_output:
            self.output_chunks[-1] = self._output.nest(sent, per_chunk=True)
        return self._output.nest(sent)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        leaves = self._calling.flatten(args, kwargs)
        named = zip(self._calling.names, leaves, strict=True)
        tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, torch.Tensor)]
        for (name, tensor), expected in zip(tensors, self._expected, strict=True):
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name} of a microbatch is {tensor.dtype} of shape {tuple(tensor.shape)}; the"
                    f" pipe was made for {expected.dtype} of shape {tuple(expected.shape)}"
                )
        return tuple(tensor for _, tensor in tensors)


def _nothing_left() -> None:
    """Weight gradients of a stage whose backward is not divided: computed with the others."""


def _chunk(tensor: torch.Tensor, per_chunk: bool) -> torch.Tensor:
    return tensor[None] if per_chunk and tensor.ndim == 0 else tensor
