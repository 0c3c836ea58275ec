"""graphopt: a training step as one graph, optimized, and proven to compute the same."""

from __future__ import annotations

import importlib
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

if TYPE_CHECKING:
    from graphopt.parallel import DataParallel, Manual
    from graphopt.step import TrainStep, compile
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


# Imported on first use, so that `graphopt --help` need not wait for torch.
_HOMES = {
    "CapturedStep": "graphopt.tracing",
    "DataParallel": "graphopt.parallel",
    "Manual": "graphopt.parallel",
    "TrainStep": "graphopt.step",
    "capture": "graphopt.tracing",
    "compile": "graphopt.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
