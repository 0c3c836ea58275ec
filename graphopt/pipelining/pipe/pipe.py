"""A model divided into pipeline stages: the `Pipe`, and `pipeline` that makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from graphopt.errors import PartitionError
from graphopt.graph_utils import get_output
from graphopt.ir.metadata import known_value
from graphopt.manager.settings import level_of
from graphopt.partition import split_module
from graphopt.pipelining.pipe.assignment import assign_stages
from graphopt.pipelining.pipe.backward import insert_backward
from graphopt.pipelining.pipe.calling_convention import CallingConvention, OutputSpec
from graphopt.pipelining.pipe.exporting import ExportedModel, export_module
from graphopt.pipelining.pipe.loss import LossPicker, loss_position
from graphopt.pipelining.pipe.marks import SplitPoint, annotate_split_points
from graphopt.pipelining.pipe.mutation import copy_received_before_update, nested_graphs
from graphopt.pipelining.pipe.placement import module_of, place_state, stage_nodes
from graphopt.pipelining.pipe.proof import PipeProof, check_backward
from graphopt.pipelining.pipe.sharing import MultiUseSpec, ParameterReplica, transmit_shared
from graphopt.pipelining.pipe.stage_module import StageModule
from graphopt.verify.checks.module_constants import attribute

if TYPE_CHECKING:
    import torch.distributed as dist

    from graphopt.pipelining.stage.stage import Stage

SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True)
class PipeInfo:
    """A pipe's graph of stages and number of stages, as `build_stage` takes them.

    Attributes:
        graph: calls of the stages and what passes between them, backward included.
        num_stages: the number of stages.
        has_loss_and_backward: whether the pipe computes gradients.
        pipe: the pipe, from which `build_stage` takes what passes between the stages.

    >>> from graphopt.pipelining import PipeSequential, pipeline
    >>> pipe = pipeline(PipeSequential(torch.nn.ReLU(), torch.nn.Tanh()), (torch.ones(2),))
    >>> pipe.info().num_stages
    2
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    pipe: Pipe | None = field(default=None, repr=False, compare=False)


class Pipe(nn.Module):
    """A model divided into stages, callable as the whole model.

    Made by `pipeline` or `Pipe.from_tracing`. With a loss a call runs the backward as well and
    accumulates into `.grad`; what a stage receives is detached from the stage that sent it.

    Attributes:
        split_gm: the graph of stages, whose children `submod_<i>` are the stages.
        calling: the calling convention of the model.
        output_spec: the nested structure of the model's output.
        num_stages: the number of stages.
        has_loss_and_backward: whether a call computes gradients.
        replicated_params: the parameters that several stages hold.

    >>> from graphopt.pipelining import PipeSequential, pipeline
    >>> pipe = pipeline(PipeSequential(torch.nn.ReLU(), torch.nn.Tanh()), (torch.ones(2),))
    >>> pipe.num_stages, pipe.has_loss_and_backward
    (2, False)
    """

    def __init__(
        self,
        split_gm: fx.GraphModule,
        calling: CallingConvention,
        output_spec: OutputSpec,
        loss_index: int | None,
        replicated_params: list[ParameterReplica],
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.num_stages = len(stage_nodes(split_gm.graph))
        self.has_loss_and_backward = loss_index is not None
        self.replicated_params = replicated_params
        self.calling = calling
        self.output_spec = output_spec
        self._loss_index = loss_index

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
        output_loss_value_spec: Any = None,
        multi_use_param_spec: MultiUseSpec = None,
    ) -> Pipe:
        """Exports `mod` on one microbatch of example arguments and divides it at its marks.

        Args:
            mod: a model with `pipe_split()` in its code or with annotated split points.
            example_args, example_kwargs: arguments of one microbatch.
            split_policy: puts marks into the exported graph, such as `balanced(4)`.
            output_loss_value_spec: where the loss is among the outputs: nested as they are, True
                for the loss and False for all else. Not needed for a `LossWrapper` with a
                `loss_spec` or an output mapping with a key "loss".
            multi_use_param_spec: what happens to parameters that several stages use, for all or by
                name; replicated when None.

        Raises:
            ModuleCaptureError: the model cannot be exported as one graph.
            PartitionError: a stage is empty, the loss spec does not fit, the stages cannot be
                separated, or an argument is of another kind than described here.
            VerificationError: the stages do not do together what the model does.
        """
        _check_arguments(mod, example_args, example_kwargs, split_policy)
        exported = export_module(mod, tuple(example_args), dict(example_kwargs or {}), split_policy)
        loss_index = _loss_index(mod, exported, output_loss_value_spec)
        graph = exported.graph_module.graph
        stage_of = assign_stages(graph)
        proof = _proof_of(exported)
        regions = nested_graphs(exported.graph_module, graph)
        transmit_shared(graph, stage_of, exported.state, multi_use_param_spec, regions)
        copy_received_before_update(graph, stage_of, regions)
        exported.graph_module.recompile()
        whole = exported.graph_module
        split = split_module(whole, whole, stage_of.__getitem__, verify="off")  # below, as a whole
        top, replicas = place_state(split, exported.state)
        _pass_all_arguments(top)
        if proof is not None:
            proof.check_stages(top, replicas)
        if loss_index is not None:
            insert_backward(top, loss_index)
        if loss_index is not None and proof is not None:
            check_backward(top, loss_index)
        return Pipe(top, exported.calling, exported.output_spec, loss_index, replicas)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all stages, and their backward if there is a loss; returns the model's output.

        Raises:
            TypeError: the arguments do not fit the signature of the model's forward.
            ValueError: they differ from the example's in more than the values of tensors.
        """
        flat = self.calling.flatten(args, kwargs)
        return self.output_spec.nest(list(self.split_gm(*flat)))

    @property
    def loss_fn(self) -> LossPicker:
        """`loss_fn(output, target)` for a schedule: the loss that the model itself computes.

        Raises:
            ValueError: the pipe has no loss.
        """
        if self._loss_index is None:
            raise ValueError("the pipe has no loss: give the schedule a loss function of your own")
        return LossPicker(self._loss_index)

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """The module of one stage; the first takes the model's arguments.

        Raises:
            ValueError: there is no such stage.
        """
        return module_of(self.split_gm, self._call_of(stage_idx))

    def info(self) -> PipeInfo:
        """The graph of stages and the number of stages."""
        return PipeInfo(self.split_gm.graph, self.num_stages, self.has_loss_and_backward, self)

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: dist.ProcessGroup | None = None
    ) -> Stage:
        """Builds one stage for the schedules of `torch.distributed.pipelining`.

        The stage keeps nothing of the pipe alive but its own parameters and buffers, which are
        moved to `device`. Of a parameter that an earlier stage holds as well it has a copy.

        Raises:
            ValueError: there is no such stage.
        """
        # Not at the top: torch.distributed is not in every build of torch.
        from graphopt.pipelining.stage.building import build_stage

        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group)

    def print_readable(self) -> str:
        """Prints the code of the graph of stages and of each stage, and returns it."""
        text = str(self)
        print(text)
        return text

    def __str__(self) -> str:
        parts = [f"Pipe of {self.num_stages} stages", self.split_gm.code.strip()]
        for index in range(self.num_stages):
            parts += [f"# stage {index}", self.get_stage_module(index).code.strip()]
        return "\n\n".join(parts)

    def _call_of(self, stage_idx: int) -> fx.Node:
        if stage_idx not in range(self.num_stages):
            raise ValueError(f"there is no stage {stage_idx}; the pipe has {self.num_stages}")
        return stage_nodes(self.split_gm.graph)[stage_idx]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    output_loss_value_spec: Any = None,
    multi_use_param_spec: MultiUseSpec = None,
) -> Pipe:
    """Divide a model into pipeline stages.

    Args:
        module: the model; it is as before afterwards, and shares its parameters with the pipe.
        mb_args, mb_kwargs: example arguments of one microbatch.
        split_spec: boundaries by the qualified names of submodules.
        split_policy, output_loss_value_spec, multi_use_param_spec: see `Pipe.from_tracing`.

    Raises:
        ValueError: both `split_spec` and `split_policy`.
        ModuleCaptureError, PartitionError: see `Pipe.from_tracing`.

    >>> from graphopt.pipelining import SplitPoint, pipeline
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> pipe = pipeline(model, (torch.ones(2),), split_spec={"1": SplitPoint.BEGINNING})
    >>> torch.equal(pipe(torch.ones(2)), model(torch.ones(2)))
    True
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError("pipeline takes a split_spec or a split_policy, not both")
    if split_spec is not None:
        _check_arguments(module, mb_args, mb_kwargs, split_policy)
        annotate_split_points(module, split_spec)
    return Pipe.from_tracing(
        module, mb_args, mb_kwargs, split_policy, output_loss_value_spec, multi_use_param_spec
    )


def _check_arguments(mod: Any, args: Any, kwargs: Any, split_policy: Any) -> None:
    if not isinstance(mod, nn.Module):
        raise PartitionError(f"a pipe is made of an nn.Module, not of {mod!r}")
    if not isinstance(args, (tuple, list)):
        raise PartitionError(
            f"the example arguments are a {type(args).__name__}; they are a tuple with one entry"
            " for each positional argument, such as (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise PartitionError(
            f"the example keyword arguments are a {type(kwargs).__name__}; they are a mapping"
        )
    if split_policy is not None and not callable(split_policy):
        raise PartitionError(f"split_policy is a function of a GraphModule, not {split_policy!r}")


def _proof_of(exported: ExportedModel) -> PipeProof | None:
    """The proof obligation of an exported model, or None if `verify` is off."""
    if level_of(None) == "off":
        return None
    module, state = exported.graph_module, exported.state

    def find(node: fx.Node) -> Any:
        tensor = state.tensor(str(node.target))
        return attribute(module, node) if tensor is None else tensor

    return PipeProof(module, find)


def _loss_index(mod: nn.Module, exported: ExportedModel, spec: Any) -> int | None:
    leaves: Any = get_output(exported.graph_module.graph).args[0]
    values = [known_value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    output = exported.output_spec.nest(values)
    index = loss_position(mod, output, spec)
    if index is None:
        return None
    loss = values[index]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise PartitionError(f"the loss must be a tensor with one element; it is {what}")
    return index


def _pass_all_arguments(top: fx.GraphModule) -> None:
    """Gives the first stage all arguments of the model, in order and by name."""
    call = stage_nodes(top.graph)[0]
    first = module_of(top, call)
    own = dict(zip(call.args, first.graph.find_nodes(op="placeholder"), strict=True))
    arguments = top.graph.find_nodes(op="placeholder")
    body = next(node for node in first.graph.nodes if node.op != "placeholder")
    for argument in arguments:
        if argument in own:
            body.prepend(own[argument])
            continue
        with first.graph.inserting_before(body):
            placeholder = first.graph.placeholder(argument.name)
        placeholder.meta = dict(argument.meta)
    call.args = tuple(arguments)
    for graph_module in (first, top):
        graph_module.graph.lint()
        graph_module.recompile()
