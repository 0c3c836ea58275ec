"""Pipeline stages for the schedules of `torch.distributed.pipelining`, which run their module or
the graphs that `compile` makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from graphopt.errors import GraphOptError
from graphopt.parallel import DataParallel, Parallel
from graphopt.pipelining.errors import StageCompileError
from graphopt.pipelining.pipe.calling_convention import CallingConvention, OutputNest
from graphopt.pipelining.pipe.sharing import ParameterReplica

if TYPE_CHECKING:
    from typing_extensions import Self

    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.manager import PassManager, PassRecord
    from graphopt.pipelining.stage.capture import Microbatch
    from graphopt.pipelining.stage.compiled import CompiledStage

DEFAULT_PIPELINE = "comm_fusion_with_concat -> schedule_comm_wait"


class Stage(PipelineStage):
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

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        received: tuple[torch.Tensor, ...],
        sent: tuple[torch.Tensor, ...],
        divides: bool,
        output: OutputNest,
        calling: CallingConvention | None = None,
        replicas: Sequence[ParameterReplica] = (),
    ) -> None:
        super().__init__(
            module,
            stage_index,
            num_stages,
            device,
            input_args=received,
            output_args=sent,
            group=group,
            dw_builder=None if divides else lambda: _nothing_left,
        )
        self.replicas = [r for r in replicas if stage_index in dict(r.holders)]
        self._calling, self._divides = calling, divides and stage_index > 0
        self._received, self._sent = received, sent
        self._output = output
        self._compiled: CompiledStage | None = None
        self._unfinished: set[int] = set()
        # What the last stage returned, by microbatch; None once the loss has been seen.
        self._returned: dict[int, tuple[torch.Tensor, ...]] | None = {}

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
        from graphopt.pipelining.stage.hand_cut import HandCutStage

        return HandCutStage(
            module, index, num_stages, torch.device(device), input_args, output_args, group
        )

    def compile(
        self,
        *,
        pipeline: str | Sequence[Any] | PassManager = DEFAULT_PIPELINE,
        parallel: Parallel | None = None,
        lower: str | Options | None = None,
        verify: str | None = None,
    ) -> Self:
        """Compiles the stage in place: from then on it runs as graphs.

        Forward and backward of one microbatch, with the average of its gradients where there is
        one, are captured as one graph, to which the passes are applied. What runs in a step is made
        from it, see docs/pipelining.md. Gradients are bit for bit those of the stage as it was.

        Args:
            pipeline: passes, as of `graphopt.compile`.
            parallel: `DataParallel(group)` averages the gradients over the ranks that hold this
                stage, in the last backward of a step; all of them have to call this. None: no
                communication of gradients.
            lower: see `graphopt.compile`; not with CUDA graphs.
            verify: see `graphopt.compile`.

        Returns:
            The stage.

        Raises:
            StageCompileError: the stage cannot be compiled, or is compiled already.
            SpmdMismatchError: the ranks of `parallel` do not hold the same stage.
        """
        if self._compiled is not None:
            raise self._refusal("it is compiled already", "build another stage to compile it anew")
        if self._unfinished:
            begun = sorted(self._unfinished)
            raise self._refusal(
                f"microbatches {begun} have had their forward but not their backward",
                "call compile() before the first step of a schedule, or between two steps",
            )
        if parallel is not None and not isinstance(parallel, DataParallel):
            raise self._refusal(
                f"parallel={parallel!r}",
                "pass graphopt.DataParallel(group) with the ranks that hold this stage, or None",
            )
        from graphopt.pipelining.stage.compiled import compile_stage

        self._compiled = compile_stage(
            self.stage_index,
            self._captured(),
            self._microbatch(),
            pipeline,
            parallel,
            lower,
            verify,
        )
        self.dw_builder = None
        return self

    def _captured(self) -> nn.Module:
        """The function that is captured: from received tensors to sent ones."""
        return self.submod

    def _microbatch(self) -> Microbatch:
        from graphopt.pipelining.stage.capture import Microbatch

        received = self._received
        if self.is_first:  # nobody is sent gradients of the model's arguments
            received = tuple(tensor.detach() for tensor in received)
        incoming = tuple(t.stride() if t.requires_grad else None for t in self._sent)
        return Microbatch(received, self._sent, incoming, self.device, self.is_last)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._compiled is not None:
            raise self._refusal(
                "a compiled stage can be neither copied nor pickled: its graphs read the parameters"
                " that it was captured with",
                "copy the stage before compile(), and compile the copy",
            )
        return super().__reduce_ex__(protocol)

    def _refusal(self, reason: str, hint: str) -> StageCompileError:
        return StageCompileError(self.stage_index, reason, hint=hint)

    @property
    def graph_module(self) -> IterGraphModule:
        """The captured graph of a microbatch after all passes.

        Raises:
            GraphOptError: the stage is not compiled.
        """
        return self._graphs().graph_module

    @property
    def lowered(self) -> list[LoweredSubgraph]:
        """The compiled regions of the graphs that have run.

        Raises:
            GraphOptError: the stage is not compiled.
        """
        return self._graphs().lowered

    @property
    def report(self) -> list[PassRecord]:
        """Records of the passes that were applied to the captured graph.

        Raises:
            GraphOptError: the stage is not compiled.
        """
        from graphopt.manager import records_of

        return records_of(self.graph_module)

    def _graphs(self) -> CompiledStage:
        if self._compiled is None:
            raise GraphOptError(
                f"stage {self.stage_index} is not compiled, so there is no graph: call its"
                " compile()"
            )
        return self._compiled

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs the forward of one microbatch; called by schedules."""
        args, kwargs = self._inputs(args, kwargs or {})
        if self.has_backward:
            self._unfinished.add(fwd_chunk_id)
        sent = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            return sent
        if self._returned is not None and self._compiled is not None and self.has_backward:
            self._returned[fwd_chunk_id] = sent
        if save_forward_output:
            self.output_chunks[-1] = self._output.nest(sent, per_chunk=True)
        return self._output.nest(sent)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the forward of one microbatch; called by `forward_one_chunk`."""
        if self._compiled is None:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._compiled.forward(args, self.has_backward)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward of one microbatch; called by schedules."""
        if self._compiled is not None:
            self._look_at_loss(self._compiled, bwd_chunk_id, loss)
            self._compiled.full, self._compiled.last = full_backward, last_backward
            if not full_backward:
                if self._divides:
                    self._compiled.refuse_hooks_on_sums()
                self.dw_builder = self._compiled.take_weights_left
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._unfinished.discard(bwd_chunk_id)

    def _look_at_loss(self, compiled: CompiledStage, chunk: int, loss: Any) -> None:
        """Finds, in the first backward of a loss, which results the loss depends on."""
        if not self._returned:
            return
        returned = self._returned.pop(chunk)
        wanted = [tensor for tensor in returned if tensor.requires_grad]
        if not wanted:
            self._returned = None
            return
        # A loss without gradient is no reason to stay away: other ranks may wait for this one.
        gradients = iter(_gradients(loss, wanted))
        if compiled.fit_to([next(gradients) if t.requires_grad else None for t in returned]):
            self._returned = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Computes the weight gradients of one microbatch; called by schedules."""
        if self._compiled is not None:
            self._compiled.last = last_backward
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._unfinished.discard(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Completes the gradients of a step; the last call of a schedule."""
        if self._compiled is not None:
            self._compiled.average()
        super().perform_reduce_grad(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divides a step's gradients; called by schedules without `perform_reduce_grad`."""
        if self._compiled is not None:
            self._compiled.average()
        super().scale_grads(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Begins a step; the first call of a schedule."""
        super().clear_runtime_states()
        self._unfinished.clear()
        if self._returned:
            self._returned.clear()
        if self._compiled is not None:
            self._compiled.begin_step(self.has_backward)

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments: the received values, or on the first stage the schedule's."""
        # Schedules give every stage of the first rank the model's keyword arguments.
        return (self._flat(args, kwargs) if self.is_first else args), {}

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        assert self._calling is not None, "subclasses take their arguments themselves"
        leaves = self._calling.flatten(args, kwargs)
        named = zip(self._calling.names, leaves, strict=True)
        tensors = [(name, leaf) for name, leaf in named if isinstance(leaf, torch.Tensor)]
        for (name, tensor), expected in zip(tensors, self._received, strict=True):
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{name} of a microbatch is {tensor.dtype} of shape {tuple(tensor.shape)}; the"
                    f" pipe was made for {expected.dtype} of shape {tuple(expected.shape)}"
                )
        return tuple(tensor for _, tensor in tensors)


def _gradients(loss: Any, of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return [None] * len(of)
    return torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)


def _nothing_left() -> None:
    """The weight backward of a stage whose backward is not divided: nothing to compute."""
