"""Pipeline parallelism: models divided into stages, and batches into microbatches."""

from typing import TYPE_CHECKING, Any

from graphopt.pipelining.errors import LostGradientError, ModuleCaptureError, StageCompileError
from graphopt.pipelining.microbatch.chunk_specs import (
    LossReducer,
    Reducer,
    Replicated,
    TensorChunkSpec,
)
from graphopt.pipelining.microbatch.merging import merge_chunks
from graphopt.pipelining.microbatch.splitting import split_args_kwargs_into_chunks
from graphopt.pipelining.pipe.backward import stage_backward
from graphopt.pipelining.pipe.balance import balanced
from graphopt.pipelining.pipe.loss import LossWrapper, TrivialLossWrapper
from graphopt.pipelining.pipe.marks import (
    PipeSequential,
    SplitPoint,
    annotate_split_points,
    pipe_split,
)
from graphopt.pipelining.pipe.pipe import Pipe, PipeInfo, pipeline
from graphopt.pipelining.pipe.sharing import MultiUseParameterConfig
from graphopt.pipelining.stage.replicas import reduce_replicated_gradients

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

    from graphopt.pipelining.stage.building import build_stage
    from graphopt.pipelining.stage.stage import Stage


def __getattr__(name: str) -> Any:
    # Not at the top: torch.distributed is not in every build of torch.
    if name == "Stage":
        from graphopt.pipelining.stage.stage import Stage

        return Stage
    if name == "build_stage":
        from graphopt.pipelining.stage.building import build_stage

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
