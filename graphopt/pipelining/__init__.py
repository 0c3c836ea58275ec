"""Models divided into pipeline stages, and batches into microbatches."""

from typing import TYPE_CHECKING, Any

from graphopt.pipelining.backward import stage_backward
from graphopt.pipelining.balance import balanced
from graphopt.pipelining.chunk_specs import LossReducer, Reducer, Replicated, TensorChunkSpec
from graphopt.pipelining.errors import LostGradientError, ModuleCaptureError, StageCompileError
from graphopt.pipelining.loss import LossWrapper, TrivialLossWrapper
from graphopt.pipelining.marks import (
    PipeSequential,
    SplitPoint,
    annotate_split_points,
    pipe_split,
)
from graphopt.pipelining.merging import merge_chunks
from graphopt.pipelining.pipe import Pipe, PipeInfo, pipeline
from graphopt.pipelining.replicas import reduce_replicated_gradients
from graphopt.pipelining.sharing import MultiUseParameterConfig
from graphopt.pipelining.splitting import split_args_kwargs_into_chunks

if TYPE_CHECKING:
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )

    from graphopt.pipelining.building import build_stage
    from graphopt.pipelining.stage import Stage


def __getattr__(name: str) -> Any:
    # Not at the top: torch.distributed is not in every build of torch.
    if name == "Stage":
        from graphopt.pipelining.stage import Stage

        return Stage
    if name == "build_stage":
        from graphopt.pipelining.building import build_stage

        return build_stage
    if name in __all__:
        from torch.distributed import pipelining

        return getattr(pipelining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LossReducer",
    "LossWrapper",
    "LostGradientError",
    "ModuleCaptureError",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "Reducer",
    "Replicated",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "Stage",
    "StageCompileError",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "annotate_split_points",
    "balanced",
    "build_stage",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "reduce_replicated_gradients",
    "split_args_kwargs_into_chunks",
    "stage_backward",
]
