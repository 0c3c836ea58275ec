"""The stages of the step pipeline that compile: Inductor regions, boxed calls, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphopt.lowering.boxed import box_calls
from graphopt.lowering.compiler import Options
from graphopt.lowering.cudagraphs import CudaGraphs
from graphopt.lowering.partial import Lowering
from graphopt.lowering.regions import MARK, mark_regions
from graphopt.manager.records import PassRecord
from graphopt.manager.stages import DerivedGraph, GraphStage
from graphopt.verify import Problem
from graphopt.verify.checks.cuda_graph_checks import recording_problems


class Lower(GraphStage):
    """Replaces marked regions by submodules that Inductor compiles.

    All graphs of one training step share the compiled regions, so that one that several graphs have
    is compiled once.
    """

    name = "lower"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._note = ""
        self.lowering = Lowering(options=options)

    def runs_on(self, which: DerivedGraph) -> bool:
        return not which.once

    def outline(self, graph: fx.Graph) -> None:
        """Marks the regions of a step; the graphs derived from it keep the marks."""
        options = self._options
        found = mark_regions(graph, min_ops=options.min_ops, random=options.random)
        found.log()
        self._note = found.note

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        if not any(MARK in node.meta for node in gm.graph.nodes):  # a graph from a file
            self.outline(gm.graph)
        return self.lowering.lower(gm)

    def describe(self, record: PassRecord) -> None:
        record.peak_bytes_before, record.peak_bytes_after = self.lowering.peak_bytes
        record.note = self._note


class RecordCudaGraphs(GraphStage):
    """Records the steady-state graph as CUDA graphs, if the options ask for them."""

    name, in_place = "record", True

    def __init__(self, options: Options) -> None:
        self._wanted = options.cudagraphs
        self._graphs = CudaGraphs()

    def runs_on(self, which: DerivedGraph) -> bool:
        return self._wanted and which.steady and not which.once

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        return self._graphs.apply(gm)

    def problems(self, gm: fx.GraphModule) -> Iterator[Problem]:
        return recording_problems(gm)


class Box(GraphStage):
    """Makes compiled regions take a list of inputs that they empty; see `boxed`."""

    name, in_place = "box", True

    def runs_on(self, which: DerivedGraph) -> bool:
        return not which.once

    def apply(self, gm: fx.GraphModule, which: DerivedGraph) -> fx.GraphModule:
        return box_calls(gm)
