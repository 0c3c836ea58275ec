"""All dependencies of one graph, as a `networkx` graph."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphopt.graph_utils import find_nodes, tensors_in
from graphopt.graph_utils.nodes import graph_of
from graphopt.host import is_host_call
from graphopt.ir.accesses import MemoryOrder
from graphopt.ir.metadata import known_value, phase_of
from graphopt.ir.operators import is_random, is_wait
from graphopt.ir.views import launch_of
from graphopt.iter_graph import IterGraph
from graphopt.verify.problems import operator_name

if TYPE_CHECKING:
    import networkx as nx


def dependency_graph(graph_module: fx.GraphModule | fx.Graph) -> nx.DiGraph:
    """Returns the graph of dependencies: nodes that must run before others.

    An edge ``u -> v`` says that `v` needs `u` first. Its attribute `kind` is a set of

    - ``"data"``: `v` reads the value of `u`;
    - ``"storage"``: both access one storage, and one of them writes it. The attribute `hazard` is
      then a set of ``"RAW"``, ``"WAR"`` and ``"WAW"``: read after write, write after read, write
      after write;
    - ``"rng"``: both draw random numbers;
    - ``"host"``: both call a function of the program's (`graphopt.callback`);
    - ``"collective"``: `v` waits for the collective that `u` launches.

    Storage, rng and host edges are chains: there is a path between any two nodes that must keep
    their order. What a collective sends counts as read until its wait.

    Nodes are the `fx.Node`s, in graph order, with the attributes `op` (readable target), `bytes`
    (of the results; None where that depends on data), `phase` (None where unknown) and `iteration`
    (1 for the late nodes of an `IterGraph`, otherwise 0).

    Every order of the nodes that is topological in this graph computes the same. Near-linear.

    >>> edges = graphopt.verify.dependency_graph(gm).edges(data="kind")
    >>> [(u, v) for u, v, kind in edges if "collective" in kind]
    [(all_reduce, wait_tensor), (all_reduce_1, wait_tensor_1)]
    """
    import networkx as nx  # a tenth of a second that other uses of this package need not wait for

    graph = graph_of(graph_module)
    late = graph.late if isinstance(graph, IterGraph) else {}
    found = nx.DiGraph()
    for node in graph.nodes:
        found.add_node(
            node,
            op=operator_name(node),
            bytes=_bytes(known_value(node)),
            phase=phase_of(node),
            iteration=int(node in late),
        )
    for node in graph.nodes:
        for source in node.all_input_nodes:
            _connect(found, source, node, "data")
        launch = launch_of(node) if is_wait(node) else None
        if launch is not None:
            _connect(found, launch, node, "collective")
    for kind, belongs in (("rng", is_random), ("host", is_host_call)):
        for earlier, later in pairwise(find_nodes(graph, belongs)):
            _connect(found, earlier, later, kind)
    for earlier, later, hazard in MemoryOrder(graph).hazards:
        _connect(found, earlier, later, "storage")
        found.edges[earlier, later].setdefault("hazard", set()).add(hazard)
    return found


def _connect(graph: nx.DiGraph, earlier: fx.Node, later: fx.Node, kind: str) -> None:
    if graph.has_edge(earlier, later):
        graph.edges[earlier, later]["kind"].add(kind)
    else:
        graph.add_edge(earlier, later, kind={kind})


def _bytes(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        size = value.numel() * value.element_size()
        return size if isinstance(size, int) else None
    if not isinstance(value, (list, tuple)):
        return 0
    sizes = [_bytes(tensor) for tensor in tensors_in(value)]
    return None if None in sizes else sum(size for size in sizes if size is not None)
