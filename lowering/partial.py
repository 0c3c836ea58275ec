"""`partial_lower`: regions of a graph that Inductor can compile become calls of compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

from torch import fx

from graphopt.graph_utils import environment, written
from graphopt.ir.outlining import describe_call
from graphopt.iter_graph import IterGraphModule
from graphopt.lowering.compiler import Options
from graphopt.lowering.extract import LoweredRegion, RegionCut
from graphopt.lowering.lowerable import NodePredicate
from graphopt.lowering.regions import RegionPredicate, mark_regions
from graphopt.lowering.subgraph import LoweredSubgraph

logger = logging.getLogger("graphopt")

Dumper = Callable[[str], str]


class Lowering:
    """Lowers marked graphs of one step, and compiles equal regions once.

    Attributes:
        subgraphs: the regions, by what they compute.
        peak_bytes: the most bytes of values that the graph lowered last holds at once, before and
            after; inputs are left out.
    """

    def __init__(self, *, dumper: Dumper | None = None, options: Options | None = None) -> None:
        self._dumper = dumper
        self._options = options or Options()
        self.subgraphs: dict[str, LoweredSubgraph] = {}
        self.peak_bytes = 0, 0

    def lower(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Replaces the regions of a marked graph by calls, in place."""
        cut = RegionCut(gm.graph)
        self.peak_bytes = cut.peak_bytes()
        if not cut.regions:
            return gm
        gm.graph = cut.splice(partial(self._call, gm))
        gm.graph.lint()
        gm.recompile()
        return gm

    def _call(
        self, gm: fx.GraphModule, graph: fx.Graph, region: LoweredRegion, inputs: list[fx.Node]
    ) -> fx.Node:
        name = next(n for n in map("subgraph_{}".format, count()) if not hasattr(gm, n))
        module = self._module(region)
        gm.add_submodule(name, module)
        node = graph.call_module(name, tuple(inputs), {"tag": self._tag(name, module)})
        states = {state for update in region.nodes for state in written(update)}
        describe_call(node, region, states)
        return node

    def _module(self, region: LoweredRegion) -> LoweredSubgraph:
        text = f"{environment()}\n{region.text()}"
        if text not in self.subgraphs:
            name = f"region {len(self.subgraphs)}"
            module = fx.GraphModule({}, region.graph)
            self.subgraphs[text] = LoweredSubgraph(module, name, self._options)
        return self.subgraphs[text]

    def _tag(self, name: str, module: LoweredSubgraph) -> str:
        if self._dumper is None:
            return name
        try:
            return str(self._dumper(module.graph_module.print_readable(print_output=False)))
        except Exception as error:
            logger.warning("the dumper failed for %s: %s: %s", name, type(error).__name__, error)
            return name


def partial_lower(
    gm: fx.GraphModule,
    node_predicate: NodePredicate | None = None,
    subgraph_predicate: RegionPredicate | None = None,
    dumper: Dumper | None = None,
    min_ops: int = 10,
    *,
    options: Options | None = None,
) -> fx.GraphModule:
    """Lets Inductor compile as much of a graph as it can; the rest runs as before.

    Each region becomes a call of a `LoweredSubgraph`, ``subgraph_0`` and so on, which compiles on
    its first call. No region delays the start of a collective, or takes away from what runs while
    one is under way. What stays outside is logged with its reason (logger ``graphopt``, INFO).

    Compiled code has no autograd: a graph whose results are to be differentiated has to hold its
    backward.

    Args:
        gm: a graph in which nodes have ``meta["val"]``, with static shapes. Changed in place; an
            `IterGraphModule` becomes final, and the graphs derived from it are lowered.
        node_predicate: decides whether to lower a node; asked for those that could be.
        subgraph_predicate: decides whether to lower a region, given its nodes in graph order.
        dumper: takes the text of a region, returns what its call is tagged with, such as the path
            of a file; the tag names the region in profiles. Without one it is the submodule's name.
        min_ops: regions with fewer ATen operators stay as they are.
        options: the options of lowering; `min_ops` is taken from the argument.

    Returns:
        `gm`.

    >>> from graphopt.lowering import partial_lower
    >>> class Deep(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.tanh(torch.exp(x.cos() * 2) + x.sin())
    >>> captured = graphopt.capture(lambda m, x: m(x), Deep(), torch.ones(8))
    >>> lowered = partial_lower(captured.graph_module, min_ops=3)
    >>> [node.target for node in lowered.graph.nodes if node.op == "call_module"]
    ['subgraph_0']
    """
    options = options or Options()
    lowering = Lowering(dumper=dumper, options=options)
    regions = mark_regions(
        gm.graph,
        node_predicate=node_predicate,
        subgraph_predicate=subgraph_predicate,
        min_ops=min_ops,
        random=options.random,
    )
    regions.log()
    if isinstance(gm, IterGraphModule):
        gm.finalize_setup(lowering.lower)
    else:
        lowering.lower(gm)
    return gm
