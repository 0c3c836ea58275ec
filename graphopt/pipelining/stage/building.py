"""Construction of a stage for schedules, from the stage's module and the pipe's information."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from graphopt.errors import PartitionError
from graphopt.graph_utils import get_output
from graphopt.manager.settings import level_of
from graphopt.pipelining.pipe.calling_convention import OutputNest
from graphopt.pipelining.pipe.placement import module_of, stage_nodes
from graphopt.pipelining.pipe.proof import check_chain
from graphopt.pipelining.pipe.stage_module import StageModule
from graphopt.pipelining.stage.chain import ChainPlan, chain_stage, plan_chain, weights_meet_inputs
from graphopt.pipelining.stage.devices import move_to_device
from graphopt.pipelining.stage.replicas import own_replicas
from graphopt.pipelining.stage.stage import Stage
from graphopt.pipelining.stage.value_flow import find_flow

if TYPE_CHECKING:
    from graphopt.pipelining.pipe.pipe import Pipe, PipeInfo


def build_stage(
    module: nn.Module,
    index: int,
    info: PipeInfo,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> Stage:
    """Builds a stage that runs `module`: the pipe's own stage module, or one made from it.

    Args:
        module: `pipe.get_stage_module(index)`, or a module that takes and returns the same. Its
            parameters and buffers are moved to `device`.
        index: the index of the stage.
        info: `pipe.info()`.
        device: the device that the stage runs on.
        group: the ranks of the pipeline; None: all.

    Raises:
        PartitionError: `info` is not that of a pipe, the module is wrapped in
            DistributedDataParallel, or lacks a parameter that several stages hold.
        ValueError: there is no such stage.
        VerificationError: as one of a chain it does not do its part of the model.

    >>> import torch.distributed as dist
    >>> from graphopt.pipelining import SplitPoint, annotate_split_points, build_stage, pipeline
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> _ = annotate_split_points(model, {"1": SplitPoint.BEGINNING})
    >>> pipe = pipeline(model, mb_args=(torch.ones(2, 4),))
    >>> stage = build_stage(pipe.get_stage_module(1), 1, pipe.info(), "cpu")
    >>> stage.is_last
    True
    >>> dist.destroy_process_group()
    """
    pipe = _pipe_of(info)
    if isinstance(module, DistributedDataParallel):
        raise PartitionError(
            "a stage is averaged over its replicas by stage.compile(parallel=DataParallel(group)),"
            " not by DistributedDataParallel, which does not know of microbatches"
        )
    pipe.get_stage_module(index)
    plan = plan_chain(info.graph)
    flow = find_flow(pipe.split_gm, plan)
    chained = _chained(module, index, pipe, plan)
    move_to_device(chained, torch.device(device))
    is_own = isinstance(module, StageModule)
    received, sent = flow.received[index], flow.sent(index)
    # The first stage is not divided anyway; what another module reads is not known.
    divides = index == 0 or (is_own and weights_meet_inputs(chained.graph, received, sent))
    return Stage(
        chained,
        index,
        info.num_stages,
        torch.device(device),
        group,
        received=received,
        sent=sent,
        divides=divides,
        calling=pipe.calling,
        output=_output_nest(pipe, plan),
        replicas=pipe.replicated_params if is_own else _no_replicas(pipe, index),
    )


def _chained(module: nn.Module, index: int, pipe: Pipe, plan: ChainPlan) -> fx.GraphModule:
    """The graph of a stage in the chain, proven to do its part of the model if it is the pipe's
    own."""
    chained = chain_stage(module, stage_nodes(pipe.split_gm.graph)[index], index, plan)
    if isinstance(module, StageModule):
        if level_of(None) != "off":
            _check_chain(pipe.split_gm, index, chained, plan)
        own_replicas(chained, index, pipe.replicated_params)
    return chained


def _check_chain(top: fx.GraphModule, index: int, chained: fx.GraphModule, plan: ChainPlan) -> None:
    """Proves that a stage computes its part of the chain, if the other stages are built alike."""
    calls = enumerate(stage_nodes(top.graph))
    chain = [chain_stage(module_of(top, call), call, stage, plan) for stage, call in calls]
    chain[index] = chained
    check_chain(top, chain, plan)


def _pipe_of(info: Any) -> Pipe:
    pipe: Pipe | None = getattr(info, "pipe", None)
    if pipe is None:
        raise PartitionError(f"build_stage takes what pipe.info() returns, not {info!r}")
    return pipe


def _output_nest(pipe: Pipe, plan: ChainPlan) -> OutputNest:
    leaves: Any = get_output(pipe.split_gm.graph).args[0]
    positions = {node: position for position, node in enumerate(plan.returned)}
    return OutputNest(
        tuple((positions[x],) if isinstance(x, fx.Node) else (None, x) for x in leaves),
        pipe.output_spec,
    )


def _no_replicas(pipe: Pipe, index: int) -> list[Any]:
    for replica in pipe.replicated_params:
        name = dict(replica.holders).get(index)
        if name is not None:
            raise PartitionError(
                f"'{name}' is held by several stages, whose gradients are added by name; so stage"
                f" {index} is built from pipe.get_stage_module({index}) itself. Or pass"
                " multi_use_param_spec=MultiUseParameterConfig.TRANSMIT to pipeline"
            )
    return []
