"""Discovery of passes: the files in `graphopt.passes`, and entry points of other packages.

A package offers passes by an entry point of the group ``graphopt.passes``, whose value is a module
that declares passes, or ``module:name`` of one pass.

`graphopt` takes the names below from here, so that whoever uses them has all passes to choose from.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import pkgutil
from functools import cache
from typing import Any

from graphopt.manager import (
    Pass,
    PassManager,
    PassRegistry,
    applied_passes,
    default_registry,
    enable_graph_optimization_dump,
    graph_optimization_pass,
    parse_pipeline,
)

__all__ = [
    "PassManager",
    "PassRegistry",
    "applied_passes",
    "enable_graph_optimization_dump",
    "graph_optimization_pass",
    "parse_pipeline",
    "registry",
]

logger = logging.getLogger("graphopt")

GROUP = "graphopt.passes"

registry = default_registry()


def load() -> None:
    """Imports all modules that declare passes. An entry point that fails is logged and skipped."""
    package = importlib.import_module("graphopt.passes")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"graphopt.passes.{found.name}")
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        try:
            loaded = entry_point.load()
            if isinstance(loaded, Pass):
                registry.register(loaded)
        except Exception as error:  # whatever a package does while it is imported
            logger.warning(
                "passes of %s are left out: entry point %s = %s raised %s: %s",
                entry_point.dist.name if entry_point.dist else "an unknown package",
                entry_point.name,
                entry_point.value,
                type(error).__name__,
                error,
            )


@cache
def install() -> None:
    """Makes the default registry discover passes at its first use."""
    registry.add_loader(load)
    registry.pipelines["default"] = _default


def _default() -> list[Any]:
    pipelines = importlib.import_module("graphopt.stages.pipelines")
    found: list[Any] = pipelines.default_pipeline()
    return found


install()
