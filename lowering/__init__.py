"""Compilation of graphs by Inductor. Import as ``graphopt.lowering``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "lowering":
    raise ImportError("import graphopt.lowering instead of lowering", name=__name__)

if TYPE_CHECKING:
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.partial import partial_lower
    from graphopt.lowering.subgraph import LoweredSubgraph
    from graphopt.lowering.triton_kernels import TritonKernel, compile_triton

__all__ = ["LoweredSubgraph", "Options", "TritonKernel", "compile_triton", "partial_lower"]

_HOMES = {
    "LoweredSubgraph": "graphopt.lowering.subgraph",
    "Options": "graphopt.lowering.compiler",
    "TritonKernel": "graphopt.lowering.triton_kernels",
    "compile_triton": "graphopt.lowering.triton_kernels",
    "partial_lower": "graphopt.lowering.partial",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphopt.lowering' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
