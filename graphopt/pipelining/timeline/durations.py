"""Durations of each stage's forward and backward: given, or measured in one process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphopt._compat import schedules
from graphopt.errors import ScheduleError
from graphopt.graph_utils import get_output
from graphopt.pipelining.pipe.pipe import Pipe
from graphopt.pipelining.pipe.placement import stage_nodes
from graphopt.pipelining.stage.chain import ChainPlan, chain_stage, plan_chain, weights_meet_inputs
from graphopt.pipelining.stage.devices import move_to_device
from graphopt.pipelining.stage.value_flow import StageFlow, find_flow
from graphopt.pipelining.timeline.slots import Action


@dataclass(frozen=True)
class StageDurations:
    """The seconds that each stage takes for one microbatch, by kind of action.

    Attributes:
        forward: the seconds of F, the forward.
        backward: the seconds of B, the whole backward at once.
        backward_input: the seconds of I, the backward of the inputs alone.
        backward_weight: the seconds of W, the backward of the weights alone.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def __post_init__(self) -> None:
        every = (self.forward, self.backward, self.backward_input, self.backward_weight)
        if len({len(seconds) for seconds in every}) > 1 or not self.forward:
            raise ScheduleError(
                "durations need one number for each stage: there are"
                f" {len(self.forward)} of forwards and {len(self.backward)} of backwards"
            )
        if any(not 0 <= value < float("inf") for seconds in every for value in seconds):
            raise ScheduleError("durations are seconds: finite, and not less than 0")

    @classmethod
    def given(cls, forward: Sequence[float], backward: Sequence[float]) -> StageDurations:
        """Durations from those of forwards and whole backwards, half of which go to weights'
        gradients."""
        half = tuple(seconds / 2 for seconds in backward)
        return cls(tuple(forward), tuple(backward), half, half)

    @property
    def num_stages(self) -> int:
        """The number of stages that have durations."""
        return len(self.forward)

    def of(self, action: Action) -> float:
        """The duration of an action, in seconds."""
        by_kind = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weight,
        }
        return by_kind[action.kind][action.stage]


def measure_durations(
    pipe: Pipe, device: torch.device | str = "cpu", *, repeats: int = 5
) -> StageDurations:
    """Measures the durations of each stage of a pipe in this process; medians of repeats.

    Stages run as schedules run them, on copies of their parameters and buffers, with random numbers
    for what is floating point among the model's arguments and zeros for all else. Gradients that
    arrive are ones. A backward begins at the pipe's loss, or where it has none at the sum of what
    it returns. For the first stage I is nothing and W the whole backward, as in torch; for a stage
    whose backward is not divided it is the other way round.

    Args:
        pipe: on any device; it is as before afterwards.
        device: the device on which stages run.
        repeats: runs of each stage that count. One more goes before them.

    Raises:
        ScheduleError: nothing that the pipe returns needs a gradient.
    """
    plan = plan_chain(pipe.split_gm.graph)
    flow = find_flow(pipe.split_gm, plan)
    device = torch.device(device)
    measured = []
    # Examples and dropout would leave the caller with other random numbers.
    with torch.random.fork_rng(_cuda_indices(device)), torch.enable_grad():
        inputs = _examples(flow, device)
        for index in range(pipe.num_stages):
            stage = _stage_alone(pipe, index, plan, flow, device)
            measured.append(stage.measure(inputs, repeats))
            inputs = stage.sent(inputs)
    return StageDurations(*zip(*measured, strict=True))


@dataclass(frozen=True)
class _StageAlone:
    index: int
    module: fx.GraphModule
    received: tuple[Tensor, ...]
    loss: Callable[[Sequence[Tensor]], Tensor] | None
    divides: bool
    device: torch.device

    def measure(self, inputs: Sequence[Tensor], repeats: int) -> tuple[float, float, float, float]:
        """The median seconds of F (forward), B (backward), I (input) and W (weight gradients)."""
        runs = [self._run(inputs) for _ in range(repeats + 1)][1:]
        forward, backward, backward_input, backward_weight = (
            statistics.median(seconds) for seconds in zip(*runs, strict=True)
        )
        if self.index and self.divides:
            return forward, backward, backward_input, backward_weight
        return forward, backward, backward * bool(self.index), backward * (not self.index)

    def sent(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the stage sends on."""
        with torch.no_grad():
            return list(self.module(*inputs))

    def _run(self, inputs: Sequence[Tensor]) -> tuple[float, float, float, float]:
        forward, leaves, outputs = self._forward(inputs)
        if not any(value.requires_grad for value in outputs):
            return forward, 0.0, 0.0, 0.0
        backward = self._seconds(lambda: self._whole_backward(outputs))
        self.module.zero_grad()
        if not (self.index and self.divides):
            return forward, backward, 0.0, 0.0
        _, leaves, outputs = self._forward(inputs)
        groups: list[Any] = []

        def input_gradients() -> None:
            gradients = None if self.loss else [torch.ones_like(value) for value in outputs]
            differentiated = [value for value in leaves if value.requires_grad]
            groups.append(schedules.input_backward(outputs, gradients, differentiated, self.module))

        backward_input = self._seconds(input_gradients)
        backward_weight = self._seconds(lambda: schedules.weight_backward(groups[0], self.module))
        self.module.zero_grad()
        return forward, backward, backward_input, backward_weight

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[float, list[Tensor], list[Tensor]]:
        """The forward's seconds, its leaves for received values, and the tensors to
        differentiate."""
        leaves = [
            value.detach().requires_grad_(like.requires_grad)
            for value, like in zip(inputs, self.received, strict=True)
        ]
        results: list[Tensor] = []
        seconds = self._seconds(lambda: results.extend(self._outputs(leaves)))
        return seconds, leaves, results

    def _outputs(self, leaves: list[Tensor]) -> list[Tensor]:
        outputs = self.module(*leaves)
        return list(outputs) if self.loss is None else [self.loss(outputs)]

    def _whole_backward(self, outputs: Sequence[Tensor]) -> None:
        roots = [value for value in outputs if value.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(value) for value in roots])

    def _seconds(self, run: Callable[[], None]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _stage_alone(
    pipe: Pipe, index: int, plan: ChainPlan, flow: StageFlow, device: torch.device
) -> _StageAlone:
    call = stage_nodes(pipe.split_gm.graph)[index]
    module = copy.deepcopy(chain_stage(pipe.get_stage_module(index), call, index, plan))
    move_to_device(module, device)
    received = flow.received[index]
    return _StageAlone(
        index,
        module,
        received,
        _loss_of(pipe, plan) if index == pipe.num_stages - 1 else None,
        weights_meet_inputs(module.graph, received, flow.sent(index)),
        device,
    )


def _loss_of(pipe: Pipe, plan: ChainPlan) -> Callable[[Sequence[Tensor]], Tensor]:
    """The loss among the tensors that the last stage returns, or the sum of all of them."""
    if not pipe.has_loss_and_backward:
        return _total
    leaves: Any = get_output(pipe.split_gm.graph).args[0]
    loss: fx.Node = leaves[pipe.loss_fn.index]
    position = plan.returned.index(loss)
    return lambda outputs: outputs[position]


def _total(outputs: Sequence[Tensor]) -> Tensor:
    """The sum of all elements that can have gradients, in place of a loss."""
    parts = [value.float().sum() for value in outputs if value.requires_grad]
    if not parts:
        raise ScheduleError("nothing that the pipe returns needs a gradient")
    return torch.stack(parts).sum()


def _examples(flow: StageFlow, device: torch.device | str) -> list[Tensor]:
    return [_example(description, device) for description in flow.received[0]]


def _example(description: Tensor, device: torch.device | str) -> Tensor:
    if description.is_floating_point() or description.is_complex():
        return torch.randn(description.shape, dtype=description.dtype, device=device)
    return torch.zeros(description.shape, dtype=description.dtype, device=device)


def _cuda_indices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
