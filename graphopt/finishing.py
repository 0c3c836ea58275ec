"""The last stage of a pipeline: what makes the graphs of a step run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import fx

from graphopt.errors import LoweringError

if TYPE_CHECKING:
    from graphopt.host_votes import Agreement
    from graphopt.iter_graph import IterGraphModule
    from graphopt.lowering.compiler import Options
    from graphopt.lowering.cudagraphs import CudaGraphs
    from graphopt.lowering.partial import Lowering
    from graphopt.lowering.subgraph import LoweredSubgraph


class Finishing:
    """Makes graphs final and says how they run. All graphs of a step share one.

    Args:
        options: how to lower; None: not at all.
    """

    def __init__(self, options: Options | None) -> None:
        self._options = options
        self._lowering: Lowering | None = None
        self._graphs: CudaGraphs | None = None

    @property
    def regions(self) -> list[LoweredSubgraph]:
        """The compiled regions; one that several graphs have is listed once."""
        return [] if self._lowering is None else list(self._lowering.subgraphs.values())

    def finish(
        self, module: IterGraphModule, once: bool = False, agreement: Agreement | None = None
    ) -> None:
        """Make the graph of `module` final, and say how the graphs derived from it run.

        Args:
            once: it runs a single time, so that compiling it would take longer than it saves.
            agreement: when all ranks agree that no function of the program's has raised.
        """
        from graphopt.iter_graph.module import DERIVED

        options = self._options
        finalize = partial(_finalize, agreement=agreement)
        if options is None or once:
            module.finalize_setup(lambda derived: finalize(derived, derived.meta[DERIVED]))
            return
        from graphopt.lowering.boxed import box_calls
        from graphopt.lowering.partial import Lowering
        from graphopt.lowering.regions import mark_regions

        if self._lowering is None:
            self._lowering = Lowering(options=options)
        lower = self._lowering.lower
        record = self._recording(options, "main" if module.graph.late else "setup")
        mark_regions(module.graph, min_ops=options.min_ops, random=options.random).log()
        module.finalize_setup(
            lambda derived: box_calls(
                record(finalize(lower(derived), derived.meta[DERIVED]), derived.meta[DERIVED])
            )
        )
        if options.ahead:
            module.prepare()

    def _recording(
        self, options: Options, steady: str
    ) -> Callable[[fx.GraphModule, str], fx.GraphModule]:
        """What lets the graph that runs in the steady state run as CUDA graphs, if asked for."""
        if not options.cudagraphs:
            return lambda graph_module, name: graph_module
        from graphopt.lowering.cudagraphs import CudaGraphs

        if self._graphs is None:
            self._graphs = CudaGraphs()
        graphs = self._graphs
        return lambda graph_module, name: (
            graphs.apply(graph_module) if name == steady else graph_module
        )


def _finalize(
    graph_module: fx.GraphModule, name: str, agreement: Agreement | None
) -> fx.GraphModule:
    from graphopt.executable import finalize

    final = finalize(graph_module)
    if not agreement or name == "drain":
        return final
    from graphopt.host_votes import with_agreement

    return with_agreement(final, agreement)


def options_for(lower: str | Options | None) -> Options | None:
    """How to lower, given what `graphopt.compile` was given.

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
