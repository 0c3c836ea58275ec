"""Extraction of regions: each region of a marked graph becomes a call of a submodule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from graphopt.graph_utils import (
    follows_output_convention,
    get_outputs,
    may_alias,
    set_outputs,
    tensors_in,
    written,
)
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import is_fused_optimizer, is_item
from graphopt.ir.outlining import NodeCopies, OutlinedPart, give_items, leaving, splice
from graphopt.lowering.compiler import kind_of
from graphopt.lowering.lowerable import as_factory, reads_metadata_only
from graphopt.lowering.memory import peak_of
from graphopt.lowering.regions import MARK, RegionMark, mark_regions
from graphopt.schedule.program import step_peak_bytes


class LoweredRegion(OutlinedPart):
    """A region as a separate graph, whose results have storage of their own."""

    def text(self) -> str:
        """A text that is equal for regions of equal computation and kinds of inputs."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        lines = []
        for node, index in number.items():
            if node.op == "placeholder":
                what = str(kind_of(fake_value(node)))
            else:
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
                kinds = [kind_of(tensor) for tensor in tensors_in(known_value(node))]
                what = f"{node.target}{arguments} -> {kinds}"
            lines.append(f"%{index} = {node.op} {what}")
        return "\n".join(lines)


class RegionCut:
    """A marked graph divided into its regions and the rest; the graph itself is unchanged.

    Attributes:
        ordered: all nodes, in an order in which each region stands in one piece.
        regions: in that order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._source = graph
        self._marks = _marks(graph)
        self.ordered = sorted(graph.nodes, key=lambda node: self._marks[node][:2])
        members: dict[int, list[fx.Node]] = {}
        for node in self.ordered:
            if self._marks[node].region >= 0:
                members.setdefault(self._marks[node].region, []).append(node)
        self.regions = list(map(self._region, members.values()))

    def peak_bytes(self) -> tuple[int, int]:
        """The most bytes of values held at once, in the order of the graph and in that of regions;
        inputs are left out, and so is what compiled code does not keep of a region."""
        free = {node for node in self.ordered if self._marks[node].free}
        return step_peak_bytes(self._source), peak_of(self.ordered, free)

    def _region(self, nodes: list[fx.Node]) -> LoweredRegion:
        region = LoweredRegion(nodes, self._inside)
        region.fill()
        leave = leaving(region.nodes, lambda user: not reads_metadata_only(user))
        region.returning(tensor for node in leave for tensor in _tensors_of(node))
        for node in region.graph.nodes:
            node.meta.pop(MARK, None)
        return region

    def _inside(self, region: OutlinedPart, copies: NodeCopies, node: fx.Node) -> fx.Node:
        """The node in a region's graph that stands for a node outside it."""
        return _copied(copies, node) if self._marks[node].free else region.take(node)

    def splice(self, call: Callable[[fx.Graph, LoweredRegion, list[fx.Node]], fx.Node]) -> fx.Graph:
        """Copies the graph, with one call in place of each region.

        Args:
            call: inserts the call of a region, given the new graph, the region and its inputs;
                returns the node.
        """

        def insert(copies: NodeCopies, region: OutlinedPart) -> None:
            assert isinstance(region, LoweredRegion)
            give_items(copies, region, call(copies.graph, region, list(map(copies, region.inputs))))

        ordered = (node for node in self.ordered if not self._marks[node].free)
        graph = splice(self._source, ordered, self.regions, insert, self._outside)
        for node in graph.nodes:
            node.meta.pop(MARK, None)
        self._forget_updates(graph)
        return graph

    def _forget_updates(self, graph: fx.Graph) -> None:
        """Removes the updates that regions do in place from the output."""
        if not follows_output_convention(graph):
            return
        outputs = get_outputs(graph)
        updates = [node for node in outputs.updates if node.op != "placeholder"]
        set_outputs(graph, outputs._replace(updates=updates))

    def _outside(self, copies: NodeCopies, node: fx.Node) -> Any:
        """The node that gives, outside of a region, a value that the region does not return."""
        if self._marks[node].region >= 0:
            if written(node):
                return copies(written(node)[0])
            if isinstance(fake_value(node), (list, tuple)) and not may_alias(node):
                items = {user.args[1]: user for user in node.users if is_item(user)}
                return [copies(items[index]) for index in range(len(fake_value(node)))]
        return _copied(copies, node)


def _copied(copies: NodeCopies, node: fx.Node) -> fx.Node:
    """A copy of `node`, without its argument if it reads only the argument's metadata."""
    if not reads_metadata_only(node):
        return copies.copy(node)
    call = as_factory(node)
    assert call is not None
    copy = copies.graph.call_function(*call)
    copy.meta = dict(node.meta)
    return copy


def _marks(graph: fx.Graph) -> dict[fx.Node, RegionMark]:
    """The marks of all nodes; a node without one stays outside the regions."""
    marks: dict[fx.Node, RegionMark] = {}
    for node in graph.nodes:
        mark = node.meta.get(MARK)
        if node.op in ("placeholder", "get_attr"):
            mark = RegionMark(-1)
        elif node.op == "output":
            mark = RegionMark(max((mark.level for mark in marks.values()), default=-1) + 1)
        elif mark is None:
            sources = [marks[source] for source in node.all_input_nodes]
            mark = RegionMark(max((m.level + (m.region >= 0) for m in sources), default=0))
        marks[node] = mark
    return marks


def _tensors_of(node: fx.Node) -> Iterator[fx.Node]:
    """The node, or its `getitem` nodes if it has several results."""
    if isinstance(fake_value(node), (list, tuple)):
        yield from (user for user in node.users if is_item(user))
    else:
        yield node


def region_graphs(gm: fx.GraphModule, min_ops: int = 10) -> list[fx.GraphModule]:
    """Returns the regions of a graph, each as a separate graph.

    Args:
        gm: left as it is, except for marks in the metadata of its nodes.

    Returns:
        Graphs that take tensors described by ``meta["val"]`` and return a list of tensors.
    """
    mark_regions(gm.graph, node_predicate=lambda n: not is_fused_optimizer(n), min_ops=min_ops)
    return [fx.GraphModule({}, region.graph) for region in RegionCut(gm.graph).regions]
