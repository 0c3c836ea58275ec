"""The graph of one device that stands for all ranks of a sharded step together.

The graph of a sharded step is one rank's. Here it is read for all ranks at once: in place of what a
rank holds of a value stand the *blocks* of all ranks beside one another.

    placeholder of rows            the blocks, cut from the whole placeholder
    window(x, starts)              the blocks, cut from x
    elementwise operators          the same of the blocks
    exchange, sum in rank order    all_reduce of the blocks
    gather                         the blocks themselves
    copy_ into rows                what the ranks own of the blocks, copied into the whole

So the result can be compared with the step of one device. These are the axioms of sharding, each
with a test on real ranks (tests/test_zero_proof.py): an elementwise operator commutes with taking
rows at multiples of 64 elements; to scatter a reduction and gather it is an all-reduce; to exchange
and add in rank order is to scatter a reduction, up to the order of sums over more than two ranks;
a norm is made of the norms of rows, up to the order of sums.

Whatever else reads what a rank holds, or lets it depend on what other ranks need not have, is
refused: the blocks of the other ranks would not be what is written here.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, is_copy, is_list_operator, is_pointwise
from graphopt.graph_utils.inserting import call_function_giving
from graphopt.ir.metadata import fake_value, input_kind, known_value
from graphopt.ir.operators import is_operator, operator_of
from graphopt.ir.placement import placement_of
from graphopt.ir.rows import ALIGNED, RowShards
from graphopt.verify.problems import Problem
from graphopt.verify.sharded_norms import NormsOfRows, norm_order, stands_for_norms

aten, functional = torch.ops.aten, torch.ops._c10d_functional

_KEEP_ELEMENTS = frozenset({aten.clone.default, aten._to_copy.default, aten.alias.default})
_REDUCING_LISTS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")
_SAME_INPUTS = frozenset({"parameter", "optimizer_state", "hyperparameter"})
"""Kinds of inputs that all ranks have alike, where they have them whole."""


class NotOfBlocksError(Exception):
    """What a rank holds is read in a way that says nothing of the other ranks."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.problem = Problem(message, (node,), hint=_HINT)


_HINT = (
    "rows go through elementwise operators, norms, gathers, and copies into rows; gather what"
    " anything else reads"
)


def for_all_ranks(sharded: fx.Graph, marked: fx.Graph, ranks: int, group: str) -> fx.Graph:
    """The graph of one device that says what all ranks compute together.

    Args:
        sharded: as a rank runs it.
        marked: as it was captured, with placeholders of whole shapes.
        ranks, group: over which it is sharded.

    Raises:
        NotOfBlocksError: a node reads what a rank holds in another way.
    """
    wholes = {n.target: fake_value(n) for n in marked.find_nodes(op="placeholder")}
    return _Blocks(sharded, wholes, ranks, group).run()


class _Blocks:
    """One reading. `blocks`: by the node of one rank, the blocks of all ranks."""

    def __init__(self, graph: fx.Graph, wholes: Any, ranks: int, group: str) -> None:
        self._graph, self._wholes, self._ranks, self._group = graph, wholes, ranks, group
        self._new = fx.Graph()
        self._copies: dict[fx.Node, Any] = {}
        self._blocks: dict[fx.Node, fx.Node] = {}
        self._listed: dict[fx.Node, Any] = {}
        self._cut: dict[fx.Node, RowShards] = {}
        self._exchanged: dict[fx.Node, fx.Node] = {}
        self._gathered: dict[fx.Node, fx.Node] = {}
        self._norms: dict[fx.Node, NormsOfRows] = {}
        self._same: set[fx.Node] = set()
        self._same_entries: dict[fx.Node, list[bool]] = {}

    def run(self) -> fx.Graph:
        """Read all nodes."""
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
        """Updates of rows are updates of wholes; what is returned is whole."""
        results, _, carried = cast(Any, output.args[0])
        for node in [*results, *carried]:
            if isinstance(node, fx.Node) and self._is_partial(node):
                raise NotOfBlocksError(f"%{node.name} is returned, of which ranks hold rows", node)
        self._new.node_copy(output, self._copies.__getitem__)

    def _note_same(self, node: fx.Node) -> None:
        """Note that all ranks have the same value, if they do."""
        traits = operator_of(node)
        if node.op == "placeholder":
            same = input_kind(node) in _SAME_INPUTS and node not in self._blocks
        elif traits.collective:
            same = traits.same_on_all and bool(node.args[-1] == self._group)
        else:
            same = not traits.random and all(map(self._same.__contains__, node.all_input_nodes))
        if same:
            self._same.add(node)

    def _copy(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if self._is_partial(source):
                raise NotOfBlocksError(f"%{node.name} reads what only this rank holds", node)
        self._copies[node] = self._new.node_copy(node, self._copies.__getitem__)
        self._note_same(node)

    def _is_partial(self, node: fx.Node) -> bool:
        if node in self._listed:
            return any(_compat.tree_leaves(self._listed[node]))
        return node in self._blocks or node in self._norms or node in self._exchanged

    def _placeholder(self, node: fx.Node) -> None:
        copy = self._copies[node] = self._new.node_copy(node)
        if placement_of(node).rows is None:
            self._note_same(node)
            return
        copy.meta = {**copy.meta, "val": self._wholes[node.target]}
        shards = self._cut[node] = RowShards(tuple(fake_value(copy).shape), self._ranks)
        self._blocks[node] = self._windows(copy, shards.starts, shards.length, node)

    def _make(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(self._new, target, args, kwargs, like=node)

    def _windows(self, whole: fx.Node, starts: Any, length: int, node: fx.Node) -> fx.Node:
        """The blocks that are cut from a tensor."""
        value = fake_value(whole)
        flat = whole if value.dim() == 1 else self._make(node, aten.reshape.default, whole, [-1])
        total = fake_value(flat).numel()
        if list(starts) == list(range(0, total, length)) and total == length * self._ranks:
            return flat
        cuts = [self._make(node, aten.slice.Tensor, flat, 0, s, s + length) for s in starts]
        return self._make(node, aten.cat.default, cuts)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self._listed:
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
            self._blocks[node] = self._blocks[cast(fx.Node, node.args[0])]
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

    def _pick(self, node: fx.Node) -> None:
        """An item of what a list operator gives."""
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
            raise NotOfBlocksError(f"%{source.name} need not be the same on all ranks", node)
        self._blocks[node] = self._windows(self._copies[source], starts, length, node)

    def _owned(self, node: fx.Node) -> None:
        source, offsets, lengths, size, group = cast(Any, node.args)
        if source not in self._blocks or group != self._group:
            raise NotOfBlocksError(f"%{source.name} is nothing that ranks hold rows of", node)
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
        if node.args[-1] == self._group and isinstance(sent, fx.Node):
            if kind == "all_to_all_single" and not self._is_partial(sent):
                size = fake_value(sent).numel() // self._ranks
                if (
                    list(cast(Any, node.args[1]))
                    == list(cast(Any, node.args[2]))
                    == ([size] * self._ranks)
                ):
                    self._exchanged[node] = self._copies[sent]
                    return
            if kind == "reduce_scatter_tensor" and not self._is_partial(sent):
                self._blocks[node] = self._reduced(node, self._copies[sent], str(node.args[1]))
                return
            if kind == "all_gather_into_tensor" and sent in self._blocks:
                self._gathered[node] = self._blocks[sent]
                return
            if kind == "all_reduce" and sent in self._norms:
                self._norms[node] = self._norms[sent].reduced(str(node.args[1]), node)
                return
        self._copy(node)

    def _reduced(self, node: fx.Node, sent: fx.Node, how: str) -> fx.Node:
        launched = self._make(node, functional.all_reduce.default, sent, how, self._group)
        return self._make(node, functional.wait_tensor.default, launched)

    def _summed(self, node: fx.Node) -> None:
        source, ranks = cast(Any, node.args)
        if source not in self._exchanged or ranks != self._ranks:
            raise NotOfBlocksError(f"%{source.name} is nothing that all ranks have sent", node)
        self._blocks[node] = self._reduced(node, self._exchanged[source], "sum")

    def _write(self, node: fx.Node) -> None:
        """What the ranks own is copied into the whole."""
        destination, value = cast(tuple[fx.Node, fx.Node], node.args[:2])
        shards = self._cut.get(destination)
        if shards is None or value not in self._blocks:
            raise NotOfBlocksError(f"%{node.name} copies between rows and a whole", node)
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
        """The norm of the whole, of which a rank has that of its rows."""
        order = norm_order(node)
        if order is None:
            raise NotOfBlocksError(f"%{node.name} is no norm that rows have parts of", node)
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
        """One more step from the norms of rows to those of wholes."""
        found = stands_for_norms(node, self._norms)
        if found is None:
            raise NotOfBlocksError(f"%{node.name} reads the norm of rows as that of a whole", node)
        if isinstance(found, fx.Node):
            self._copies[node] = found
            self._same.add(node)
        else:
            self._norms[node] = found

    def _of_all(self, node: fx.Node) -> fx.Node:
        return self._blocks.get(node) or cast(fx.Node, self._copies[node])

    def _compute(self, node: fx.Node) -> None:
        """An elementwise operator of the blocks, or a list of such."""
        if is_list_operator(node) and not is_operator(node.target, *_REDUCING_LISTS):
            self._compute_entries(node)
            return
        self._check_operands(node, node.all_input_nodes, fake_value(node))
        if not _is_elementwise(node):
            raise NotOfBlocksError(f"%{node.name} reads what only this rank holds", node)
        length = fake_value(node).numel()
        if length % ALIGNED == 0:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of_all)
            self._blocks[node] = self._giving(node, args, kwargs, self._ranks)
            return
        parts = []
        for rank in range(self._ranks):  # each has a rest behind its last multiple
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of(rank, node))
            parts.append(self._giving(node, args, kwargs, 1))
        self._blocks[node] = self._make(node, aten.cat.default, parts)

    def _giving(self, node: fx.Node, args: Any, kwargs: Any, ranks: int, cut: Any = None) -> Any:
        """A call of what a node calls, with the blocks of so many ranks.

        Args:
            cut: of a list operator: which entries are blocks.
        """

        def of(value: Any, is_cut: bool = True) -> Any:
            if not is_cut or value.dim() != 1:
                return value
            return value.new_empty(ranks * value.numel())

        value = fake_value(node)
        if cut is not None and value and isinstance(value[0], (list, tuple)):
            value = type(value)([list(map(of, column, cut)) for column in value])
        elif cut is not None:
            value = list(map(of, value, cut))
        else:
            value = of(value)
        return call_function_giving(
            self._new, cast(Any, node.target), args, kwargs, value, like=node
        )

    def _of(self, rank: int, reader: fx.Node) -> Any:
        """What one rank has of each operand."""

        def of(node: fx.Node) -> fx.Node:
            if node not in self._blocks:
                return cast(fx.Node, self._copies[node])
            length = fake_value(node).numel()
            start = rank * length
            cut = (self._blocks[node], 0, start, start + length)
            return self._make(reader, aten.slice.Tensor, *cut)

        return of

    def _check_operands(self, node: fx.Node, given: list[fx.Node], value: Any) -> None:
        """What is computed of rows is computed alike on all ranks."""
        of_rows = [source for source in given if source in self._blocks]
        shapes = {tuple(fake_value(source).shape) for source in of_rows}
        if len(shapes) != 1 or tuple(getattr(value, "shape", ())) not in shapes:
            raise NotOfBlocksError(f"%{node.name} reads rows that are cut otherwise", node)
        for source in given:
            if source in self._blocks:
                continue
            if not _is_number(source):
                raise NotOfBlocksError(f"%{node.name} reads rows beside the whole", node)
            if source not in self._same:
                text = f"%{node.name} reads %{source.name}, which ranks need not have alike"
                raise NotOfBlocksError(text, node)

    def _compute_entries(self, node: fx.Node) -> None:
        names = [argument.name for argument in _compat.schema_of(node.target).arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        lists = [v for v in given.values() if isinstance(v, (list, tuple)) and v]
        shared = [v for v in given.values() if isinstance(v, fx.Node)]
        value = fake_value(node)
        several = bool(value) and isinstance(value[0], (list, tuple))
        columns = list(value) if several else [value]
        partial = []
        same = self._same_entries[node] = []
        for index in range(len(lists[0])):
            one = [v[index] for v in lists if isinstance(v[index], fx.Node)]
            same.append(all(map(self._same.__contains__, [*one, *shared])))
            partial.append(any(each in self._blocks for each in one))
            if partial[-1]:
                first = next(column[index] for column in columns if len(column))
                self._check_operands(node, [*one, *shared], first)
        lengths = [fake_value(each).numel() for v in lists for each in v if each in self._blocks]
        if any(length % ALIGNED for length in lengths):
            self._rank_by_rank(node, columns, several, partial)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of_all)
            self._copies[node] = self._giving(node, args, kwargs, self._ranks, partial)
        marks = [
            [is_partial and entry.dim() == 1 for is_partial, entry in zip(partial, c, strict=False)]
            for c in columns
        ]
        self._listed[node] = marks if several else marks[0]
        self._note_same(node)

    def _rank_by_rank(
        self, node: fx.Node, columns: list[Any], several: bool, partial: list[bool]
    ) -> None:
        """Entries of which each rank has a rest behind the last multiple."""
        calls = []
        for rank in range(self._ranks):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of(rank, node))
            calls.append(self._giving(node, args, kwargs, 1, partial))

        def items(column: Any, *path: int) -> list[fx.Node]:
            found = []
            for index, is_partial in enumerate(partial[: len(column)]):
                parts = [self._item(node, call, *path, index) for call in calls]
                joined = is_partial and column[index].dim() == 1
                found.append(self._make(node, aten.cat.default, parts) if joined else parts[0])
            return found

        found = [items(c, n) if several else items(c) for n, c in enumerate(columns)]
        self._copies[node] = found if several else found[0]

    def _item(self, node: fx.Node, source: fx.Node, *path: int) -> fx.Node:
        for index in path:
            source = self._make(node, operator.getitem, source, index)
        return source


def _is_number(node: fx.Node) -> bool:
    value = known_value(node)
    return not isinstance(value, torch.Tensor) or tuple(value.shape) in ((), (1,))


def _is_elementwise(node: fx.Node) -> bool:
    if operator_of(node).random:
        return False
    return (
        is_pointwise(node.target)
        or node.target in _KEEP_ELEMENTS
        or (operator_of(node).metadata_only and "_like" in str(node.target))
    )
