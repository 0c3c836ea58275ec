"""Translation of one rank's sharded graph to a graph that stands for all ranks together.

A sharded step's graph is that of one rank. Here it is read for all ranks at once: each value of
which a rank holds a part is replaced by the *blocks* of all ranks, concatenated.

    placeholder of rows            the blocks, cut from the whole placeholder
    window(x, starts)              the blocks, cut from x
    elementwise operators          the same of the blocks
    exchange, sum in rank order    all_reduce of the blocks
    all_reduce down the column     all_reduce of the blocks over all ranks, of what was summed
    gather                         the blocks themselves
    copy_ into rows                what the ranks own of the blocks, copied into the whole

So the result can be compared with the step of one device. These are the axioms of sharding, each
with a test on real ranks (tests/test_zero_proof.py): an elementwise operator commutes with taking
rows at multiples of 64 elements; to scatter a reduction and gather it is an all-reduce; to exchange
and add in rank order is to scatter a reduction, up to the order of sums over more than two ranks;
a norm is made of the norms of rows, up to the order of sums; to sum over a row of a mesh of ranks,
and down its column, is to sum over all, up to the order of sums.

Any other reader of a rank's block is refused, and so is a block that depends on values which may
differ between ranks, since the blocks of the other ranks would not follow.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, cast

import torch
from torch import fx

from graphopt.graph_utils import is_copy
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.metadata import fake_value
from graphopt.ir.operators import argument, is_operator, operator_of
from graphopt.ir.placement import placement_of
from graphopt.ir.rows import RowShards
from graphopt.verify.sharding.shard_mesh import ShardMesh
from graphopt.verify.sharding.sharded_elements import ComputedBlocks, NotOfBlocksError
from graphopt.verify.sharding.sharded_norms import NormsOfRows, combined_norm, norm_order

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def for_all_ranks(sharded: fx.Graph, marked: fx.Graph, mesh: ShardMesh) -> fx.Graph:
    """Translates a sharded graph to the single-device graph that all ranks compute together.

    Args:
        sharded: the graph that one rank runs.
        marked: the captured graph, whose placeholders have whole shapes.
        mesh: the ranks over which it is sharded.

    Raises:
        NotOfBlocksError: a node reads what a rank holds in another way.
    """
    wholes = {n.target: fake_value(n) for n in marked.find_nodes(op="placeholder")}
    return _AllRanksTranslation(sharded, wholes, mesh).run()


class _AllRanksTranslation(ComputedBlocks):
    """Translates one rank's graph into symbolic values of all ranks, collectives included."""

    def run(self) -> fx.Graph:
        """Translates all nodes in order."""
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._finish(node)
            else:
                self._copy(node)
        return self._new

    def _finish(self, output: fx.Node) -> None:
        """Adds the output, which must return whole values only."""
        results, _, carried = cast(Any, output.args[0])
        for node in [*results, *carried]:
            if isinstance(node, fx.Node) and self._is_partial(node):
                raise NotOfBlocksError(
                    f"%{node.name} is returned, though each rank holds rows of it", node
                )
        self._new.node_copy(output, self._copies.__getitem__)

    def _copy(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if self._is_partial(source):
                raise NotOfBlocksError(
                    f"%{node.name} reads a value of which each rank holds rows", node
                )
        self._copies[node] = self._new.node_copy(node, self._copies.__getitem__)
        self._note_same(node)

    def _placeholder(self, node: fx.Node) -> None:
        copy = self._copies[node] = self._new.node_copy(node)
        if placement_of(node).rows is None:
            self._note_same(node)
            return
        copy.meta = {**copy.meta, "val": self._wholes[node.target]}
        shards = self._cut[node] = RowShards(tuple(fake_value(copy).shape), self._ranks)
        self._blocks[node] = self._windows(copy, shards.starts, shards.length, node)

    def _call(self, node: fx.Node) -> None:
        if isinstance(node.target, Assumption):
            self._assume(node)
        elif node.target is operator.getitem and node.args[0] in self._listed:
            self._pick(node)
        elif is_operator(node.target, "graphopt_shards::window"):
            self._window(node)
        elif is_operator(node.target, "graphopt_shards::owned"):
            self._owned(node)
        elif is_operator(node.target, "graphopt_shards::sum_of_ranks"):
            self._summed(node)
        elif operator_of(node).collective:
            self._launched(node)
        elif operator_of(node).wait and node.args[0] in self._exchanged:
            self._exchanged[node] = self._exchanged[cast(fx.Node, node.args[0])]
        elif operator_of(node).wait and node.args[0] in self._gathered:
            self._copies[node] = self._gathered[cast(fx.Node, node.args[0])]
            self._same.add(node)
        elif operator_of(node).wait and node.args[0] in self._blocks:
            launch = cast(fx.Node, node.args[0])
            self._blocks[node] = self._blocks[launch]
            if launch in self._row_sums:
                self._row_sums[node] = self._row_sums[launch]
        elif any(source in self._norms for source in node.all_input_nodes):
            self._of_norms(node)
        elif not any(map(self._is_partial, node.all_input_nodes)):
            self._copy(node)
        elif is_copy(node):
            self._write(node)
        elif is_operator(node.target, "aten::linalg_vector_norm", "aten::_foreach_norm"):
            self._norm(node)
        else:
            self._compute(node)

    def _assume(self, node: fx.Node) -> None:
        """Copies an assumption, which may depend only on values that all ranks have."""
        for source in node.all_input_nodes:
            if self._is_partial(source) and source.op != "placeholder":
                raise NotOfBlocksError(
                    f"%{node.name} decides by a value of which each rank holds rows", node
                )
        self._copies[node] = self._new.node_copy(node, self._copies.__getitem__)

    def _pick(self, node: fx.Node) -> None:
        """Translates an item of a list operator's result."""
        source, index = cast(tuple[fx.Node, int], node.args)
        partial = self._listed[source][index]
        held = self._copies.get(source)
        if isinstance(held, list):  # computed rank by rank
            picked = held[index]
        else:
            picked = self._make(node, operator.getitem, held, index)
        self._copies[node] = picked
        if isinstance(partial, list):
            self._listed[node] = partial
            self._same_entries[node] = self._same_entries[source]
        elif isinstance(partial, NormsOfRows):
            self._norms[node] = NormsOfRows([picked], partial.order)
        elif partial:
            self._blocks[node] = picked
        elif self._same_entries[source][index]:
            self._same.add(node)

    def _window(self, node: fx.Node) -> None:
        source, starts, length, group = cast(Any, node.args)
        if source not in self._same or group != self._group:
            raise NotOfBlocksError(f"%{source.name} may differ between ranks", node)
        self._blocks[node] = self._windows(self._copies[source], starts, length, node)

    def _owned(self, node: fx.Node) -> None:
        source, offsets, lengths, size, group = cast(Any, node.args)
        if source not in self._blocks or group != self._group:
            raise NotOfBlocksError(f"%{source.name} is not sharded into rows", node)
        blocks = self._blocks[source]
        length = fake_value(source).numel()
        parts = []
        for rank, (offset, count) in enumerate(zip(offsets, lengths, strict=True)):
            start = rank * length + offset
            if count:
                parts.append(self._make(node, aten.slice.Tensor, blocks, 0, start, start + count))
            if count < size:
                parts.append(self._make(node, aten.new_zeros.default, blocks, [size - count]))
        self._blocks[node] = self._make(node, aten.cat.default, parts)

    def _launched(self, node: fx.Node) -> None:
        sent = node.args[0]
        kind = operator_of(node).reduction
        down_column = self._mesh.replicas is not None and node.args[-1] == self._mesh.replicas
        if down_column and kind == "all_reduce" and node.args[1] == "sum":
            whole = self._row_sums.get(cast(fx.Node, sent))
            if whole is not None:
                self._blocks[node] = self._reduced(node, whole, "sum", self._mesh.everyone.group)
                return
        if node.args[-1] == self._group and isinstance(sent, fx.Node):
            if kind == "all_to_all_single" and not self._is_partial(sent):
                size = fake_value(sent).numel() // self._ranks
                sizes = [list(cast(Any, each)) for each in node.args[1:3]]
                if sizes == 2 * [[size] * self._ranks]:
                    self._exchanged[node] = self._copies[sent]
                    return
            has_size = kind.startswith(("reduce_scatter", "all_gather"))
            if has_size and argument(node, "group_size") != self._ranks:
                message = f"%{node.name} has another number of ranks than the mesh"
                raise NotOfBlocksError(message, node)
            if kind == "reduce_scatter_tensor" and not self._is_partial(sent):
                self._scattered(node, self._copies[sent], str(node.args[1]))
                return
            if kind == "all_gather_into_tensor" and sent in self._blocks:
                self._gathered[node] = self._blocks[sent]
                return
            if kind == "all_reduce" and sent in self._norms:
                self._norms[node] = self._norms[sent].reduced(str(node.args[1]), node)
                return
        self._copy(node)

    def _scattered(self, node: fx.Node, sent: fx.Node, how: str) -> None:
        """Replaces a scattered reduction by the reduction of the whole value."""
        self._blocks[node] = self._reduced(node, sent, how, self._group)
        if how == "sum":
            self._row_sums[node] = sent

    def _reduced(self, node: fx.Node, sent: fx.Node, how: str, group: str) -> fx.Node:
        launched = self._make(node, functional.all_reduce.default, sent, how, group)
        return self._make(node, functional.wait_tensor.default, launched)

    def _summed(self, node: fx.Node) -> None:
        source, ranks = cast(Any, node.args)
        if source not in self._exchanged or ranks != self._ranks:
            raise NotOfBlocksError(
                f"%{source.name} is not the result of an exchange of all ranks", node
            )
        self._scattered(node, self._exchanged[source], "sum")

    def _write(self, node: fx.Node) -> None:
        """Translates an update of rows: the blocks' owned elements are copied into the whole
        tensor."""
        destination, value = cast(tuple[fx.Node, fx.Node], node.args[:2])
        shards = self._cut.get(destination)
        if shards is None or value not in self._blocks:
            raise NotOfBlocksError(f"%{node.name} copies between rows and a whole tensor", node)
        blocks = self._blocks[value]
        if not shards.is_even:
            first = itertools.count(0, shards.length)
            cuts = [
                self._make(node, aten.slice.Tensor, blocks, 0, at + offset, at + offset + count)
                for at, offset, count in zip(first, shards.offsets, shards.lengths, strict=False)
                if count
            ]
            blocks = self._make(node, aten.cat.default, cuts)
        whole = self._make(node, aten.view.default, blocks, list(shards.shape))
        copy = self._make(node, aten.copy_.default, self._copies[destination], whole)
        self._copies[node] = copy
        self._cut[node] = shards
        self._blocks[node] = self._windows(copy, shards.starts, shards.length, node)

    def _norm(self, node: fx.Node) -> None:
        """Replaces the norm of a rank's rows by the norm of the whole tensor."""
        order = norm_order(node)
        if order is None:
            raise NotOfBlocksError(f"%{node.name} is no norm that can be combined from rows", node)
        args = fx.node.map_arg(node.args, self._of_all)
        self._copies[node] = new = self._make(node, node.target, *args, **node.kwargs)
        if is_operator(node.target, "aten::_foreach_norm"):
            given = cast(Any, node.args[0])
            of_rows = NormsOfRows([], order)
            self._listed[node] = [of_rows if each in self._blocks else False for each in given]
            self._same_entries[node] = [each in self._same for each in given]
        else:
            self._norms[node] = NormsOfRows([new], order)

    def _of_norms(self, node: fx.Node) -> None:
        """Translates a step that combines the norms of rows into the norm of a whole tensor."""
        found = combined_norm(node, self._norms)
        if found is None:
            raise NotOfBlocksError(
                f"%{node.name} reads the norm of rows as that of a whole tensor", node
            )
        if isinstance(found, fx.Node):
            self._copies[node] = found
            self._same.add(node)
        else:
            self._norms[node] = found
