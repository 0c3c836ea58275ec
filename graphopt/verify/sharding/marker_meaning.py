"""A proof that collectives mean what the markers (`reduce_gradient`, `sync_buffers`) mean that they
replaced.

A marked graph is the step of one device with markers where ranks share a value. Their meaning is
written out here in collectives of single tensors, without any code of `graphopt.parallel`:

    reduce_gradient(g)     the sum over the ranks of g * (1 / ranks)
    sync_buffers([b, …])   each b of the first rank

The graph that a kind of parallelism makes must compute the same terms. It may fill buckets,
flatten, and reorder communication. Compared are which sums are made how often, with which scale, in
which group.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from graphopt.graph_utils import call_function_with_meta, find_nodes
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import is_marker, is_operator
from graphopt.iter_graph import copy_graph
from graphopt.verify.differences.outcome_differences import value_problems
from graphopt.verify.equivalence import Proof
from graphopt.verify.problems import Problem
from graphopt.verify.sharding.shard_mesh import RanksOfGroup, ShardMesh
from graphopt.verify.sharding.sharded import for_all_ranks
from graphopt.verify.sharding.sharded_elements import NotOfBlocksError
from graphopt.verify.symbolic.evaluation import evaluate_graph
from graphopt.verify.symbolic.evaluation_outcome import NotDecidedError
from graphopt.verify.values.terms import Terms

logger = logging.getLogger("graphopt")

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_MUL = torch.ops.aten.mul.Tensor
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_PERMUTE = torch.ops.aten.permute.default


def averaged(marked: fx.Graph) -> fx.Graph:
    """Copies a graph and replaces each marker by an average over all ranks, or a broadcast."""
    graph, _ = copy_graph(marked)
    for marker in find_nodes(graph, is_marker):
        with graph.inserting_before(marker):
            if is_operator(marker.target, "graphopt::reduce_gradient"):
                marker.replace_all_uses_with(_mean(graph, marker))
            else:
                _write_out_broadcasts(graph, marker)
        graph.erase_node(marker)
    return graph


def _mean(graph: fx.Graph, marker: fx.Node) -> fx.Node:
    gradient, _, ranks, group = marker.args
    assert isinstance(ranks, int)
    call = _alike if _has_contiguous_strides(fake_value(cast(fx.Node, gradient))) else _call
    part = call(graph, marker, _MUL, gradient, 1 / ranks)
    layout = _memory_order(fake_value(part))
    if layout is None:
        launched = call(graph, marker, _ALL_REDUCE, part, "sum", group)
        return call(graph, marker, _WAIT, launched)
    rows = _call(graph, marker, _PERMUTE, part, layout)  # what is sent lies in one piece
    total = _shared(graph, marker, _ALL_REDUCE, rows, "sum", group)
    back = [place for _, place in sorted((dim, place) for place, dim in enumerate(layout))]
    return _call(graph, marker, _PERMUTE, total, back)


def _has_contiguous_strides(value: torch.Tensor) -> bool:
    """True if a tensor has the strides of a new contiguous one, dimensions of size 1 included."""
    strides, step = [], 1
    for size in reversed(value.shape):
        strides.append(step)
        step *= max(size, 1)
    return value.stride() == tuple(reversed(strides))


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """Returns the dimensions of a dense tensor, outermost in memory first. None if the tensor is
    contiguous."""
    if value.is_contiguous():
        return None
    strides = value.stride()
    steps = [(-stride, value.shape[dim] == 1, dim) for dim, stride in enumerate(strides)]
    return [dim for *_, dim in sorted(steps)]


def _write_out_broadcasts(graph: fx.Graph, marker: fx.Node) -> None:
    buffers, _, _, group = marker.args
    broadcast, contiguous = torch.ops._c10d_functional.broadcast.default, torch.contiguous_format
    for item in list(marker.users):
        assert item.target is operator.getitem
        buffer = cast(Any, buffers)[cast(int, item.args[1])]
        buffer = _call(graph, marker, torch.ops.aten.clone.default, buffer, form=contiguous)
        item.replace_all_uses_with(_shared(graph, marker, broadcast, buffer, 0, group))
        graph.erase_node(item)


def _shared(graph: fx.Graph, marker: fx.Node, target: Any, sent: Any, *how: Any) -> fx.Node:
    """Appends a collective and its wait, and returns the wait."""
    launched = _call(graph, marker, target, sent, *how)
    return _call(graph, marker, _WAIT, launched)


def _alike(graph: fx.Graph, marker: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Appends a call that has the marker's metadata; the graph is only read, so nodes may share
    it."""
    node = graph.call_function(target, args)
    node.meta = marker.meta
    return node


def _call(graph: fx.Graph, marker: fx.Node, target: Any, *args: Any, form: Any = None) -> fx.Node:
    options = {} if form is None else {"memory_format": form}
    return call_function_with_meta(graph, target, args, options, like=marker)


Definition = Callable[[fx.Graph], fx.Graph]

MEANINGS: Mapping[str, Definition] = {"averaged": averaged, "sharded": averaged}
"""The definition of markers by the name that a kind of parallelism gives. For "sharded" it is the
same, but the graph is read for all ranks together (`graphopt.verify.sharding.sharded`)."""


def sharing_problems(
    meaning: str,
    marked: fx.Graph,
    shared: fx.GraphModule,
    proof: Proof | None = None,
    axes: Sequence[str] = (),
) -> Iterator[Problem]:
    """Yields a problem for each value that the ranks share otherwise than the markers say. Where
    terms cannot describe the marked graph, or `meaning` has no definition, logs that nothing was
    compared.

    Args:
        meaning: of `MEANINGS`.
        marked: the captured graph with its markers.
        shared: the graph that a kind of parallelism made of it.
        proof: that is to know the calls of it afterwards.
        axes: the groups along the axes of the mesh of ranks, where they are not the markers'.
    """
    definition = MEANINGS.get(meaning)
    if definition is None:
        logger.info("values shared between ranks are not checked: their meaning has no definition")
        return
    if meaning == "sharded":
        yield from _problems_of_sharded(definition(marked), marked, shared.graph, axes)
        return
    report = (proof or Proof()).compare(definition(marked), shared.graph)
    if report.decidable:
        yield from report.problems
    else:
        logger.info("values shared between ranks are not checked: %s", report.problems[0].message)


def _problems_of_sharded(
    wanted: fx.Graph, marked: fx.Graph, sharded: fx.Graph, axes: Sequence[str]
) -> Iterator[Problem]:
    """Yields the differences between what all ranks compute together and the step on one device. An
    undecidable case is a problem, too: no unproven sharded graph runs."""
    markers = find_nodes(marked, is_marker)
    if not markers:
        return
    gradients = [m for m in markers if is_operator(m.target, "graphopt::reduce_gradient")]
    ranks, group = (gradients or markers)[0].args[2:4]  # buffers may have a group of their own
    mesh = ShardMesh.of(RanksOfGroup(cast(int, ranks), str(group)), axes)
    if mesh is None:
        yield Problem(f"the groups {list(axes)} are no row and column of the ranks of {group!r}")
        return
    terms = Terms(whole_cuts=True)
    try:
        together = for_all_ranks(sharded, marked, mesh)
        old, new = (evaluate_graph(graph, terms) for graph in (wanted, together))
    except (NotOfBlocksError, NotDecidedError) as error:
        yield error.problem
        return
    yield from value_problems(terms, old, new)
