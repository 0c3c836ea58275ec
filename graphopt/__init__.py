"""graphopt: a training step as one graph, optimized, and proven to compute the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.errors import (
    CaptureError,
    GraphOptError,
    LoweringError,
    PartitionError,
    PassDefinitionError,
    PassOrderError,
    PipelineSyntaxError,
    SpmdMismatchError,
    VerificationError,
)
from graphopt.parallel import DataParallel, Manual
from graphopt.step import TrainStep, compile

if TYPE_CHECKING:
    from graphopt.tracing import CapturedStep
    from graphopt.tracing.capture import capture

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CapturedStep",
    "DataParallel",
    "GraphOptError",
    "LoweringError",
    "Manual",
    "PartitionError",
    "PassDefinitionError",
    "PassOrderError",
    "PipelineSyntaxError",
    "SpmdMismatchError",
    "TrainStep",
    "VerificationError",
    "capture",
    "compile",
]


def __getattr__(name: str) -> Any:
    if name in ("capture", "CapturedStep"):
        from graphopt import tracing

        return getattr(tracing, name)
    raise AttributeError(f"module 'graphopt' has no attribute {name!r}")
