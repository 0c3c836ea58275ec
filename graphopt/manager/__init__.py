"""The pass manager: declares passes, finds them by name, orders, runs, checks and records them."""

from graphopt.manager.callbacks import PassCallback, PassContext
from graphopt.manager.declaration import Pass
from graphopt.manager.decorator import graph_optimization_pass
from graphopt.manager.options import Option, PassArgumentError
from graphopt.manager.records import PassRecord, Report, applied_passes, records_of
from graphopt.manager.registry import PassRegistry, default_registry
from graphopt.manager.running import PassManager
from graphopt.manager.settings import enable_graph_optimization_dump
from graphopt.manager.text import Pipeline, parse_pipeline

__all__ = [
    "Option",
    "Pass",
    "PassArgumentError",
    "PassCallback",
    "PassContext",
    "PassManager",
    "PassRecord",
    "PassRegistry",
    "Pipeline",
    "Report",
    "applied_passes",
    "default_registry",
    "enable_graph_optimization_dump",
    "graph_optimization_pass",
    "parse_pipeline",
    "records_of",
]
