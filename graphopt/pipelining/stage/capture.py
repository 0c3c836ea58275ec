"""Capture of a stage's microbatch: forward, backward and the averages of its gradients.

What is captured is the last microbatch of a step, in which gradients are added to those of the
microbatches before it and then averaged. `division` makes the graphs of all microbatches from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from graphopt import _compat
from graphopt.errors import CaptureError
from graphopt.host import is_host_call
from graphopt.ir.metadata import source_line
from graphopt.parallel import DataParallel
from graphopt.pipelining.errors import StageCompileError
from graphopt.runtime.agreement.agreed import CallCapture, NotAsAgreedError, OtherRanks
from graphopt.runtime.agreement.joint_capture import JointCapture
from graphopt.stages import Stages
from graphopt.stages.compiling import StepInMaking
from graphopt.tracing.call import Call
from graphopt.tracing.captured_step import CapturedStep
from graphopt.tracing.layouts.strides import corrected
from graphopt.tracing.layouts.trusted import check


@dataclass(frozen=True)
class Microbatch:
    """The tensors, without data, that a stage receives and sends for one microbatch.

    Attributes:
        received, sent: arguments and results; those with `requires_grad` have gradients.
        incoming: for each result the strides of its gradient, None where it has none.
        device: the device of all these tensors.
        is_last: true if a loss function gets the sent tensors, which it may change in place.
    """

    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    incoming: tuple[tuple[int, ...] | None, ...]
    device: torch.device
    is_last: bool

    def fakes(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The arguments and the gradients of the results, as fake tensors."""
        with _compat.new_fake_mode(corrected, check):
            inputs = [
                self._fake(tensor, tensor.stride()).requires_grad_(tensor.requires_grad)
                for tensor in self.received
            ]
            pairs = zip(self.sent, self.incoming, strict=True)
            return inputs, [s if s is None else self._fake(tensor, s) for tensor, s in pairs]

    def _fake(self, like: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=self.device)


class StageCapture:
    """Captures a stage as a graph and applies passes to it.

    Args:
        stage: index of the stage.
        module: its module.
        stages: the stages of the compiler.
        parallel: over which ranks gradients are averaged; None: they are not.
    """

    def __init__(
        self, stage: int, module: nn.Module, stages: Stages, parallel: DataParallel | None
    ) -> None:
        self._stage, self._module, self._stages = stage, module, stages
        # Buffers are not broadcast with each microbatch.
        self._parallel = parallel and dataclasses.replace(parallel, broadcast_buffers=False)
        topic = f"compile() of pipeline stage {stage}"
        self._joint = JointCapture(topic, accumulated=False)  # see `_gradients_present`

    def capture(self, microbatch: Microbatch) -> CapturedStep:
        """Captures one microbatch; with data parallelism a collective call of the group.

        Raises:
            StageCompileError: the module cannot be captured.
            SpmdMismatchError: the ranks hold different stages, or one of them did not come.
        """
        inputs, incoming = microbatch.fakes()
        call = Call(run_microbatch, (self._module, inputs, incoming), {})
        try:
            with _gradients_present(self._module):
                return self._capture(call)
        except CaptureError as error:
            raise StageCompileError(self._stage, error.reason, hint=error.hint) from error

    def _capture(self, call: Call) -> CapturedStep:
        """Runs the compile stages up to the passes; the rest runs on each divided graph."""
        for ranks in self._ways(call):
            with suppress(NotAsAgreedError), ranks:
                captured = self._stages.capture(call, ranks)
                proof = self._stages.parallelize(captured)
                step = self._stages.apply_passes(captured, proof)
                self._refuse_late(step)
                self._refuse_callbacks(step)
                ranks.agree(captured, {"microbatch": step.module})
                ranks.ready(captured)
                return captured
        raise AssertionError("ranks can always agree anew")

    def _ways(self, call: Call) -> Iterable[CallCapture]:
        if self._parallel is None:
            return [CallCapture(lasts=False)]
        mode = ("stage", self._stage)
        return self._joint.ways(call, self._parallel, True, mode, OtherRanks())

    def _refuse_late(self, step: StepInMaking) -> None:
        if step.module.graph.late:
            raise StageCompileError(
                self._stage,
                f"the pipeline {self._stages.manager} moves work to the next iteration, but the"
                " gradients of a stage have to be complete when its last microbatch is done",
                hint="leave out the pass that does so; the default is"
                " 'comm_fusion_with_concat -> schedule_comm_wait'",
            )

    def _refuse_callbacks(self, step: StepInMaking) -> None:
        found = next(filter(is_host_call, step.module.graph.nodes), None)
        if found is not None:
            line = source_line(found)
            raise StageCompileError(
                self._stage,
                f"it has {found.target}{f' ({line})' if line else ''}: what the graphs of a stage"
                " compute for several microbatches at a time is in no order for a callback",
                hint="leave the callback out, or do not compile the stage: it is called then",
            )


def run_microbatch(
    module: nn.Module, inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Runs the forward, then the backward from the gradients of the results: this is captured."""
    results: tuple[torch.Tensor, ...] = module(*inputs)
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    return results


@contextmanager
def _gradients_present(module: nn.Module) -> Iterator[None]:
    """While active, every parameter has a gradient, to which a backward adds."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
