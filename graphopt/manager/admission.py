"""Checks of a graph module before a pipeline changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graphopt.errors import IterationError, PassOrderError
from graphopt.iter_graph import IterGraphModule
from graphopt.manager.options import PassArgumentError
from graphopt.manager.records import applied_passes
from graphopt.manager.text import Pipeline, marked_text


def check_graph_module(gm: object) -> None:
    """Refuses an argument that is no graph module, with a hint at what was meant.

    Raises:
        PassArgumentError: it is none.
    """
    if isinstance(gm, fx.GraphModule):
        return
    if isinstance(getattr(gm, "graph_module", None), fx.GraphModule):
        hint = "give its graph_module"
    elif isinstance(gm, fx.Graph):
        hint = "give the fx.GraphModule that it belongs to"
    else:
        hint = "graphopt.capture(step, …).graph_module is one"
    raise PassArgumentError(
        f"a pass runs on an fx.GraphModule or an IterGraphModule, not on a {type(gm).__name__}"
        f"\n  hint:     {hint}"
    )


def check_iterations(gm: fx.GraphModule, pipeline: Pipeline, indices: Sequence[int]) -> None:
    """Refuses passes that move work to the next iteration if the graph module is a plain one.

    Raises:
        IterationError: one of the passes to run needs an `IterGraphModule`.
    """
    if isinstance(gm, IterGraphModule):
        return
    for index in indices:
        pass_ = pipeline[index].pass_
        if pass_.needs_iterations:
            raise IterationError(
                f"pass {pass_.name!r} takes an IterGraphModule, and this is a plain"
                f" {type(gm).__name__}, which has no next iteration\n"
                f"  pipeline: {marked_text(pipeline, index)}\n"
                "  hint:     wrap the graph: gm = graphopt.IterGraphModule(gm)"
            )


def check_open(gm: fx.GraphModule) -> None:
    """Refuses a graph that is final, or has an iteration in flight.

    Raises:
        PassOrderError: it is.
    """
    if not isinstance(gm, IterGraphModule):
        return
    if gm.frozen:
        raise PassOrderError(
            "the graph is final: apply passes before finalize_setup()\n"
            f"  applied:  {' -> '.join(applied_passes(gm)) or 'nothing'}"
        )
    if gm.in_flight:
        raise PassOrderError("an iteration of this graph is in flight: call flush() first")
