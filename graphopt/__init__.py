"""graphopt: a training step as one graph, rewritten by passes that are checked, run bit for bit as
eager."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphopt.errors import (
    AssumptionFailedError,
    CaptureError,
    CollectiveError,
    FileError,
    GraphOptError,
    IterationError,
    LoweringError,
    ParallelismError,
    PartitionError,
    PassDefinitionError,
    PassError,
    PassOrderError,
    PipelineSyntaxError,
    SpmdMismatchError,
    VerificationError,
)

if TYPE_CHECKING:
    from graphopt.iter_graph import IterGraph, IterGraphModule
    from graphopt.manager import PassRecord
    from graphopt.manager.discovery import (
        PassManager,
        PassRegistry,
        applied_passes,
        enable_graph_optimization_dump,
        graph_optimization_pass,
        parse_pipeline,
        registry,
    )
    from graphopt.manager.notes import note
    from graphopt.parallel import DataParallel, Manual
    from graphopt.rewriting import rewrite
    from graphopt.schedule import simulate
    from graphopt.stages.auto import AutoPipeline
    from graphopt.step import TrainStep, compile
    from graphopt.tracing import CapturedStep
    from graphopt.tracing.capture import capture
    from graphopt.tracing.effects.callback import callback

__version__ = "0.1.0"

__all__ = [
    "AssumptionFailedError",
    "AutoPipeline",
    "CaptureError",
    "CapturedStep",
    "CollectiveError",
    "DataParallel",
    "FileError",
    "GraphOptError",
    "IterGraph",
    "IterGraphModule",
    "IterationError",
    "LoweringError",
    "Manual",
    "ParallelismError",
    "PartitionError",
    "PassDefinitionError",
    "PassError",
    "PassManager",
    "PassOrderError",
    "PassRecord",
    "PassRegistry",
    "PipelineSyntaxError",
    "SpmdMismatchError",
    "TrainStep",
    "VerificationError",
    "ZeRO",
    "applied_passes",
    "callback",
    "capture",
    "compile",
    "enable_graph_optimization_dump",
    "graph_optimization_pass",
    "note",
    "parse_pipeline",
    "registry",
    "rewrite",
    "simulate",
]


# Imported on first use, so that `graphopt --help` need not wait for torch.
_HOMES = {
    "AutoPipeline": "graphopt.stages.auto",
    "CapturedStep": "graphopt.tracing",
    "DataParallel": "graphopt.parallel",
    "IterGraph": "graphopt.iter_graph",
    "IterGraphModule": "graphopt.iter_graph",
    "Manual": "graphopt.parallel",
    "PassManager": "graphopt.manager.discovery",
    "PassRecord": "graphopt.manager",
    "PassRegistry": "graphopt.manager.discovery",
    "TrainStep": "graphopt.step",
    "ZeRO": "graphopt.parallel",
    "applied_passes": "graphopt.manager.discovery",
    "callback": "graphopt.tracing.effects.callback",
    "capture": "graphopt.tracing",
    "compile": "graphopt.step",
    "enable_graph_optimization_dump": "graphopt.manager.discovery",
    "graph_optimization_pass": "graphopt.manager.discovery",
    "note": "graphopt.manager.notes",
    "parse_pipeline": "graphopt.manager.discovery",
    "registry": "graphopt.manager.discovery",
    "rewrite": "graphopt.rewriting",
    "simulate": "graphopt.schedule",
}


_MODULES = frozenset(
    {"comm", "cost", "graph_utils", "hooks", "lowering", "optim", "partition", "passes"}
    | {"pipelining", "testing", "verify"}
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"graphopt.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'graphopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    if name == "IterGraphModule":
        importlib.import_module("graphopt.viewing")  # which notebooks show it with
    globals()[name] = value
    return value
