"""Execution of a compiled stage under the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphopt._compat.tensors import count_hooks_on_sum
from graphopt.graph_utils import without_autocast
from graphopt.parallel.data_parallel import broadcast_buffers
from graphopt.parallel.markers import Group
from graphopt.pipelining.errors import StageCompileError
from graphopt.pipelining.pipe.boundary import apart, no_view
from graphopt.pipelining.stage.accumulating import GradientUpdate
from graphopt.pipelining.stage.capture import Microbatch, StageCapture
from graphopt.pipelining.stage.division import StageDivision
from graphopt.pipelining.stage.division_proof import DivisionProof
from graphopt.pipelining.stage.gradient_layout import (
    Layouts,
    common_layouts,
    laid_out,
    strides_of,
    to_add_to,
)
from graphopt.pipelining.stage.stage_graphs import StageGraph
from graphopt.pipelining.stage.state_guard import StateGuard
from graphopt.ranks.meeting import Channel
from graphopt.stages import Stages, stages_for

if TYPE_CHECKING:
    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager
    from graphopt.parallel import DataParallel

Values = Sequence["torch.Tensor | None"]

_FORWARDS = (("forward",), ("evaluation",))


def compile_stage(
    stage: int,
    module: nn.Module,
    microbatch: Microbatch,
    pipeline: str | Sequence[Any] | PassManager,
    parallel: DataParallel | None,
    lower: str | Options | None,
    verify: str | None,
) -> CompiledStage:
    """Compiles a stage; see `Stage.compile`."""
    stages = stages_for(pipeline, lower, verify)
    if stages.options is not None and stages.options.cudagraphs:
        raise StageCompileError(
            stage,
            "CUDA graphs write into the same memory on every replay, but a schedule keeps several"
            " microbatches in flight",
            hint="use lower='inductor'",
        )
    return CompiledStage(stage, module, microbatch, parallel, stages)


class CompiledStage:
    """The compiled graphs of one stage, each made when it is first needed.

    Args:
        stage: its index.
        module: holds its parameters and buffers.
        microbatch: the tensors that the stage receives and sends.
        parallel: over which ranks gradients are averaged; None: they are not.
        stages: the stages of the compiler, of which each graph goes through those behind passes.

    Attributes:
        full: the backward to come computes all gradients, not those of arguments alone.
        last: the backward to come is the last of its step.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        microbatch: Microbatch,
        parallel: DataParallel | None,
        stages: Stages,
    ) -> None:
        self._stage, self._module, self._microbatch = stage, module, microbatch
        self._parallel, self._stages = parallel, stages
        self._capture = StageCapture(stage, module, stages, parallel)
        self._captured = self._capture.capture(microbatch)
        self._forward = self._backward = StageDivision(self._captured, len(microbatch.received))
        self._owners = self._parameters()
        self._guard = StateGuard(module)
        self._graphs: dict[tuple[Any, ...], StageGraph] = {}
        self._anchor = torch.empty(0, requires_grad=True)
        self._buffers_due = False
        self._weights_left: Callable[[bool], None] | None = None
        self._launched: list[Any] | None = None
        self._proof: DivisionProof | None = None
        self.full = True
        self.last = False

    @property
    def graph_module(self) -> IterGraphModule:
        """The captured graph after all passes."""
        return self._captured.graph_module  # type: ignore[return-value]

    @property
    def constant(self) -> list[int]:
        """The positions of sent tensors that carry no gradient."""
        sent = self._microbatch.sent
        return [index for index, tensor in enumerate(sent) if not tensor.requires_grad]

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients the backward computes."""
        gradients = self._captured.live.gradients
        return [gradients[a.index].owner.tensor for a in self._backward.accumulations]

    def fit_to(self, gradients: Values) -> bool:
        """Captures another backward if the incoming gradients have another layout than the captured
        one's, or some are missing.

        Autograd computes less for missing gradients, and perhaps other bits for other layouts.
        With data parallelism all ranks of the group have to call it.

        Returns:
            Whether there are gradients, on any of the ranks; otherwise nothing is settled.
        """
        incoming = self._agree(strides_of(gradients, self._microbatch.sent))
        if all(stride is None for stride in incoming):
            return False
        if incoming != self._microbatch.incoming:
            self._capture_backward(incoming)
        return True

    def _agree(self, incoming: Layouts) -> Layouts:
        """The gradient layouts that fit all ranks, each of which sees only its own loss."""
        if self._parallel is None:
            return incoming
        group = self._parallel.everyone
        topic = f"the gradients of the results of pipeline stage {self._stage}"
        channel = Channel(group, topic, self._parallel.timeout)
        everyone = [theirs["layouts"] for theirs in channel.exchange({"layouts": incoming})]
        return common_layouts(everyone, self._microbatch.sent)

    def _capture_backward(self, incoming: Layouts) -> None:
        self._microbatch = dataclasses.replace(self._microbatch, incoming=incoming)
        self._captured = self._capture.capture(self._microbatch)
        inputs = len(self._microbatch.received)
        self._backward = StageDivision(self._captured, inputs, self._forward)
        self._owners = self._parameters()
        self._proof = None
        self._graphs = {key: g for key, g in self._graphs.items() if key in _FORWARDS}

    @property
    def lowered(self) -> list[LoweredSubgraph]:
        """The compiled regions of all graphs made so far."""
        return self._stages.regions

    def begin_step(self, has_backward: bool) -> None:
        """Begins a step; called before the first microbatch.

        Raises:
            StageCompileError: the module is not as it was compiled.
        """
        reason = self._guard.mismatch()
        if reason is not None:
            raise StageCompileError(
                self._stage,
                f"since it was compiled, {reason}",
                hint="build the stage anew with Pipe.build_stage, and compile that",
            )
        launched, self._weights_left, self._launched = self._launched, None, None
        if launched is not None:
            raise StageCompileError(
                self._stage,
                "the gradients of the last step were not completed",
                hint="a schedule calls perform_reduce_grad() of a stage at the end of each step",
            )
        broadcasts = self._parallel is not None and self._parallel.broadcast_buffers
        self._buffers_due = has_backward and broadcasts
        self._proof = None  # which knows much, and nearly all graphs are made in the first step

    def forward(self, inputs: Sequence[torch.Tensor], has_backward: bool) -> tuple[Any, ...]:
        """Runs the forward of one microbatch; returns the tensors that the stage sends."""
        if self._buffers_due:
            self._buffers_due = False
            self._receive_buffers()
        inputs = [value.contiguous() for value in inputs]
        if has_backward and len(self.constant) < len(self._microbatch.sent):
            results: tuple[Any, ...] = _MicrobatchFunction.apply(self, self._anchor, *inputs)
            return results
        results, _, _ = self._run(self._graph("evaluation"), inputs, (), [])
        return self._sent(results, ())

    def _receive_buffers(self) -> None:
        assert self._parallel is not None
        group = self._parallel.everyone
        with torch.no_grad():
            broadcast_buffers(self._module, Group(group.group_name, group.size()))

    def run_forward(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
        """Runs the forward; returns the tensors to send and those kept for the backward."""
        results, _, kept = self._run(self._graph("forward"), inputs, (), [])
        return self._sent(results, kept), list(kept)

    def _sent(
        self, results: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        pairs = zip(self._forward.results, results, strict=True)
        values = [result.of(value) for result, value in pairs]
        if self._microbatch.is_last:
            values = apart(values, [*kept, *self._states()])
        return tuple(map(no_view, values))

    def _states(self) -> list[torch.Tensor]:
        """The parameters and buffers in the graphs' order."""
        return [holder.live() for holder in self._captured.live.placeholders]

    def run_backward(self, kept: list[Any], gradients: Values) -> list[torch.Tensor | None]:
        """Runs the backward of one microbatch, or the part that the schedule asks for.

        Args:
            kept: the values that the forward kept.
            gradients: the gradients of the tensors that the stage sent.

        Returns:
            Gradients of the arguments. Those of parameters are in their `.grad`.
        """
        incoming = self._incoming(gradients)
        if self.full:
            return self._leave_gradients("backward", incoming, kept, self.last)
        results, _, carried = self._run(self._graph("input_backward"), (), incoming, kept)
        kept += carried

        def weights(last: bool) -> None:
            self._leave_gradients("weight_backward", (), kept, last)

        self._weights_left = weights
        return self._input_gradients(results)

    def take_weights_left(self) -> Callable[[], None]:
        """Takes over the weight backward that is still to run; the schedule calls it later, with
        `last` set."""
        left, self._weights_left = self._weights_left, None
        return (lambda: left(self.last)) if left is not None else _no_weights_left

    def refuse_hooks_on_sums(self) -> None:
        """Refuses hooks that torch would not call, because it adds up the gradients of a divided
        backward itself.

        Raises:
            StageCompileError: a parameter has one.
        """
        if any(map(count_hooks_on_sum, self._owners)):
            raise StageCompileError(
                self._stage,
                "a parameter has a hook (register_post_accumulate_grad_hook), which torch does not"
                " call where a schedule divides the backward",
                hint="change gradients after the step of the schedule, or take a schedule that does"
                " not divide the backward",
            )

    def _incoming(self, gradients: Values) -> list[torch.Tensor]:
        microbatch = self._microbatch
        found = []
        for gradient, like, stride in zip(
            gradients, microbatch.sent, microbatch.incoming, strict=True
        ):
            if stride is not None:
                found.append(laid_out(gradient, like, stride, microbatch.device))
            elif gradient is not None:
                raise StageCompileError(
                    self._stage,
                    "the loss depends on results on which it did not depend in the first backward",
                    hint="build a stage of its own for each loss function",
                )
        return found

    def _leave_gradients(
        self, name: str, incoming: Sequence[torch.Tensor], kept: list[Any], last: bool
    ) -> list[torch.Tensor | None]:
        how = self._how(last)
        graph = self._graph(name, how)
        results, _, carried = self._run(graph, (), incoming, kept)
        if how is GradientUpdate.SET:
            for owner, gradient in zip(self._owners, carried, strict=True):
                owner.grad = gradient
        elif how is GradientUpdate.AVERAGE:
            self._launched = list(carried)
        return self._input_gradients(results) if results else []

    def _input_gradients(self, results: Sequence[Any]) -> list[torch.Tensor | None]:
        pairs = zip(self._backward.input_gradients, results, strict=True)
        return [None if result is None else result.of(value) for result, value in pairs]

    def average(self) -> None:
        """Waits for the averages of gradients that the last backward has launched."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._run(self._graph("average"), (), (), launched)

    def _how(self, last: bool) -> GradientUpdate:
        average = last and self._parallel is not None
        if not average and all(owner.grad is None for owner in self._owners):
            return GradientUpdate.SET
        for owner in self._owners:
            owner.grad = to_add_to(owner)
        return GradientUpdate.AVERAGE if average else GradientUpdate.ADD

    def _graph(self, name: str, *options: Any) -> StageGraph:
        key = (name, *options)
        if key not in self._graphs:
            if GradientUpdate.AVERAGE in options:  # both do it together
                self._graph("average")
            division = self._forward if key in _FORWARDS else self._backward
            graph: StageGraph = getattr(division, name)(*options)
            self._prove(key, graph)
            self._stages.make_ready(graph)
            self._graphs[key] = graph
        return self._graphs[key]

    def _prove(self, key: tuple[Any, ...], graph: StageGraph) -> None:
        """Proves that a graph is the part of the captured stage that it stands for."""
        if self._stages.manager.settings.verify == "off" or key == ("average",):
            return
        if self._proof is None:
            self._proof = DivisionProof(self._stage, self._captured, self._forward, self._backward)
        self._proof.check(key, {**self._graphs, key: graph})

    def _run(
        self,
        graph: StageGraph,
        inputs: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        kept: list[Any],
    ) -> Any:
        live = self._captured.live
        states, gradients = len(live.placeholders), len(live.gradients)
        arguments = states + gradients

        def value(position: int) -> Any:
            if position < states:
                holder = live.placeholders[position]
                return holder.live()
            if position < arguments:
                return live.gradients[position - states].owner.tensor.grad
            position -= arguments
            count = len(self._microbatch.received)
            return inputs[position] if position < count else incoming[position - count]

        flat = [value(position) for position in graph.positions]
        with torch.no_grad(), without_autocast():
            return graph(*flat, kept)


class _MicrobatchFunction(torch.autograd.Function):
    """One microbatch as an autograd function, so that the schedule differentiates through it."""

    @staticmethod
    def forward(
        context: Any, stage: CompiledStage, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        sent, kept = stage.run_forward(inputs)
        context.stage, context.kept = stage, kept
        context.set_materialize_grads(False)
        context.mark_non_differentiable(*(sent[index] for index in stage.constant))
        return sent

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> Any:
        kept, context.kept = context.kept, None
        return None, None, *context.stage.run_backward(kept, gradients)


def _no_weights_left() -> None:
    """The weight backward after a whole backward: nothing to compute."""
