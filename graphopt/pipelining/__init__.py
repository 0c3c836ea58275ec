"""Models divided into pipeline stages, and batches into microbatches."""

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

__all__ = [
    "LostGradientError",
    "LossReducer",
    "LossWrapper",
    "ModuleCaptureError",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "Reducer",
    "Replicated",
    "SplitPoint",
    "StageCompileError",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "annotate_split_points",
    "balanced",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "reduce_replicated_gradients",
    "split_args_kwargs_into_chunks",
    "stage_backward",
]
