"""Defaults and parsing of a step's options: its passes, and how regions are compiled."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphopt.errors import LoweringError, PipelineSyntaxError

if TYPE_CHECKING:
    from graphopt.lowering.compiler import Options
    from graphopt.manager import PassManager
    from graphopt.manager.running import PipelineEntry

HELD_BACK = 0.4
"""The share of the gradients' bytes that the default pipeline sends after the backward: they have
the forward of the next step to travel in, and the time until its first gradient is ready. A product
of matrices takes two in the backward, so that the forward alone is a third."""


def default_pipeline() -> list[PipelineEntry]:
    """The passes that `pipeline="default"` applies to a captured step."""
    return pipeline_with(None, HELD_BACK)


def pipeline_with(min_buckets: int | None, held_back: float) -> list[PipelineEntry]:
    """The default passes with other options."""
    from graphopt import passes

    return [
        passes.remove_copy_from_optimizer,
        passes.drop_unread_gradients,
        (passes.comm_fusion_with_concat, {"min_buckets": min_buckets}),
        (passes.fuse_exchanges, {"min_buckets": min_buckets}),
        passes.schedule_comm_wait,
        passes.schedule_gathers,
        (passes.iter_move_grads_and_optimizers, {"held_back": held_back}),
        passes.schedule_updates,
    ]


def manager_for(pipeline: str | Sequence[Any] | PassManager, verify: str | None) -> PassManager:
    """The pass manager of a pipeline given by name, text, passes or as a manager.

    Raises:
        PipelineSyntaxError: no such pipeline or pass.
    """
    from graphopt.manager.discovery import PassManager, registry

    if isinstance(pipeline, PassManager):
        return pipeline
    named = {"default": default_pipeline, "none": list, "auto": default_pipeline}
    if isinstance(pipeline, str) and pipeline in named:
        return PassManager(named[pipeline](), verify=verify)
    if isinstance(pipeline, str) and pipeline not in registry.names():
        for meant in difflib.get_close_matches(pipeline, named, 1):
            raise PipelineSyntaxError(f"there is no pipeline {pipeline!r}; did you mean {meant!r}?")
    return PassManager(pipeline, verify=verify)


def options_for(lower: str | Options | None) -> Options | None:
    """The options of lowering for the arguments of `graphopt.compile`.

    Raises:
        LoweringError: no such way.
    """
    if lower is None:
        return None
    from graphopt.lowering.compiler import Options

    if isinstance(lower, Options):
        return lower
    if lower in ("inductor", "inductor+cudagraphs"):
        return Options(cudagraphs=lower.endswith("cudagraphs"))
    raise LoweringError(
        f"there is no lower={lower!r}: pass None, 'inductor', 'inductor+cudagraphs' or"
        " graphopt.lowering.Options(...)"
    )
