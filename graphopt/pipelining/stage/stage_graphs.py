"""One graph of a compiled stage, which keeps values for graphs that run later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import Outputs
from graphopt.ir.metadata import KIND, MODULES, SOURCE, VALUE, some_of
from graphopt.ir.outlining import NodeCopies, OutlinedPart
from graphopt.iter_graph import IterGraphModule
from graphopt.pipelining.stage.crossing import closure

SLOT = "slot"
"""Metadata of the placeholder of a kept value: its position among them."""


class StageGraph(IterGraphModule):
    """One graph of a captured stage, with the values that it takes from earlier ones.

    Called with a value for each of `positions` and the list of kept values, from which it takes
    what it needs, so that each value is freed after its last use.

    Args:
        graph_module: the graph in the captured dialect; kept values are placeholders with a `SLOT`.
        positions: which placeholders of the whole stage its other placeholders are.
        shared: slots that a later graph needs as well.
    """

    def __init__(
        self, graph_module: fx.GraphModule, positions: Iterable[int], shared: Collection[int] = ()
    ) -> None:
        super().__init__(graph_module)
        self.positions = tuple(positions)
        self._shared = frozenset(shared)

    def _loaded(self, executable: fx.GraphModule) -> fx.GraphModule:
        """Makes the executable graph take kept values out of their list."""
        _take_kept(executable.graph, self._shared)
        return executable


def take(kept: list[Any], slot: int) -> Any:
    """Takes a value out of `kept`, which then no longer holds it."""
    value, kept[slot] = kept[slot], None
    return value


def look_at(kept: list[Any], slot: int) -> Any:
    """Reads a kept value that a later graph needs as well."""
    return kept[slot]


def _take_kept(graph: fx.Graph, shared: Collection[int]) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    body = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(body):
        kept = graph.placeholder("kept")
    for node in placeholders:
        if SLOT not in node.meta:
            continue
        slot = node.meta[SLOT]
        with graph.inserting_before(min(node.users)):
            value = graph.call_function(look_at if slot in shared else take, (kept, slot))
        value.meta = dict(node.meta)
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def extract(
    root: torch.nn.Module,
    graph: fx.Graph,
    outputs: Outputs,
    slots: Mapping[fx.Node, int],
    also: Iterable[fx.Node] = (),
    shared: Collection[int] = (),
) -> StageGraph:
    """Copies the nodes that compute `outputs` into a separate graph.

    Args:
        root: holds the constants of `graph`.
        slots: kept values that it may take, with their positions.
        also: further nodes of `graph` that are to be computed.
        shared: slots that a later graph needs as well.
    """
    positions: list[int] = []
    returned = [leaf for leaves in outputs for leaf in leaves if isinstance(leaf, fx.Node)]
    needed = closure([*returned, *also], slots)
    members = [n for n in graph.nodes if n in needed and n.op not in ("placeholder", "output")]
    part = OutlinedPart(members, _not_needed)
    read = {source for node in needed for source in node.all_input_nodes}.union(returned)
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if node in needed:
            part.take(node, str(node.target))
            positions.append(position)
    for node, slot in sorted(slots.items(), key=lambda item: item[1]):
        if node in read:
            taken = part.take(node, f"kept_{slot}")
            taken.meta = some_of(node, VALUE, SOURCE, MODULES) | {SLOT: slot, KIND: "kept"}
    part.fill()
    part.end(tuple(outputs))
    return StageGraph(fx.GraphModule(root, part.graph), positions, shared)


def _not_needed(part: OutlinedPart, copies: NodeCopies, node: fx.Node) -> fx.Node:
    raise AssertionError(f"%{node.name} is not among the nodes that are needed")
