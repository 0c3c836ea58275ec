"""Translation of elementwise operators on one rank's block to the blocks of all ranks.

If a block's length is no multiple of 64 elements, kernels round its rest differently, so each
rank's block is computed by a call of its own.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import call_function_with_meta, is_list_operator, is_pointwise
from graphopt.graph_utils.inserting import call_function_giving
from graphopt.ir.metadata import fake_value, input_kind, known_value
from graphopt.ir.operators import arguments_by_name, is_operator, operator_of
from graphopt.ir.rows import ALIGNED, RowShards
from graphopt.verify.problems import Problem
from graphopt.verify.sharding.shard_mesh import ShardMesh
from graphopt.verify.sharding.sharded_norms import NormsOfRows

aten = torch.ops.aten

_KEEP_ELEMENTS = frozenset({aten.clone.default, aten._to_copy.default, aten.alias.default})
_REDUCING_LISTS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")
_SAME_INPUTS = frozenset({"parameter", "optimizer_state", "hyperparameter"})
"""Kinds of inputs that are equal on all ranks, if not sharded."""


class NotOfBlocksError(Exception):
    """A node reads a rank's block in a way that determines nothing about the other ranks."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.problem = Problem(message, (node,), hint=_HINT)


_HINT = (
    "rows go through elementwise operators, norms, gathers, and copies into rows; gather what"
    " anything else reads"
)


class ComputedBlocks:
    """Translates one graph's local computation; collectives are in the subclass.

    `_copies`: by the node of one rank, what all ranks have alike; `_blocks`: the blocks of all
    ranks; `_listed`: of a list, which of its items are such; `_cut`: how placeholders are cut;
    `_row_sums`: of blocks that are sums over one row of the mesh, what is summed.
    """

    def __init__(self, graph: fx.Graph, wholes: Any, mesh: ShardMesh) -> None:
        self._graph, self._wholes, self._mesh = graph, wholes, mesh
        self._ranks, self._group = mesh.shards.count, mesh.shards.group
        self._new = fx.Graph()
        self._copies: dict[fx.Node, Any] = {}
        self._blocks: dict[fx.Node, fx.Node] = {}
        self._listed: dict[fx.Node, Any] = {}
        self._cut: dict[fx.Node, RowShards] = {}
        self._exchanged: dict[fx.Node, fx.Node] = {}
        self._gathered: dict[fx.Node, fx.Node] = {}
        self._row_sums: dict[fx.Node, fx.Node] = {}
        self._norms: dict[fx.Node, NormsOfRows] = {}
        self._same: set[fx.Node] = set()
        self._same_entries: dict[fx.Node, list[bool]] = {}

    def _note_same(self, node: fx.Node) -> None:
        """Records a node whose value is the same on all ranks."""
        traits = operator_of(node)
        if node.op == "placeholder":
            same = input_kind(node) in _SAME_INPUTS and node not in self._blocks
        elif traits.collective:
            same = traits.same_on_all and node.args[-1] in (self._group, self._mesh.everyone.group)
        else:
            same = not traits.random and all(map(self._same.__contains__, node.all_input_nodes))
        if same:
            self._same.add(node)

    def _is_partial(self, node: fx.Node) -> bool:
        if node in self._listed:
            return any(_compat.tree_leaves(self._listed[node]))
        if node in self._blocks or node in self._norms or node in self._exchanged:
            return True
        return node in self._gathered and node not in self._copies  # not waited for

    def _make(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call_function_with_meta(self._new, target, args, kwargs, like=node)

    def _windows(self, whole: fx.Node, starts: Any, length: int, node: fx.Node) -> fx.Node:
        """Cuts the blocks of all ranks from a whole tensor, and concatenates them."""
        value = fake_value(whole)
        flat = whole if value.dim() == 1 else self._make(node, aten.reshape.default, whole, [-1])
        total = fake_value(flat).numel()
        if list(starts) == list(range(0, total, length)) and total == length * self._ranks:
            return flat
        cuts = [self._make(node, aten.slice.Tensor, flat, 0, s, s + length) for s in starts]
        return self._make(node, aten.cat.default, cuts)

    def _of_all(self, node: fx.Node) -> fx.Node:
        return self._blocks.get(node) or cast(fx.Node, self._copies[node])

    def _compute(self, node: fx.Node) -> None:
        """Applies an elementwise operator, or a list of them, to the blocks of all ranks."""
        if is_list_operator(node) and not is_operator(node.target, *_REDUCING_LISTS):
            self._compute_entries(node)
            return
        self._check_operands(node, node.all_input_nodes, fake_value(node))
        if not _is_elementwise(node):
            raise NotOfBlocksError(
                f"%{node.name} reads a value of which each rank holds rows", node
            )
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
        """Appends the call of a node with the blocks of `ranks` ranks.

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
        """Returns a function that gives one rank's part of an operand."""

        def of(node: fx.Node) -> fx.Node:
            if node not in self._blocks:
                return cast(fx.Node, self._copies[node])
            length = fake_value(node).numel()
            start = rank * length
            cut = (self._blocks[node], 0, start, start + length)
            return self._make(reader, aten.slice.Tensor, *cut)

        return of

    def _check_operands(self, node: fx.Node, given: list[fx.Node], value: Any) -> None:
        """Refuses operands that are cut differently, or that may differ between ranks."""
        of_rows = [source for source in given if source in self._blocks]
        shapes = {tuple(fake_value(source).shape) for source in of_rows}
        if len(shapes) != 1 or tuple(getattr(value, "shape", ())) not in shapes:
            raise NotOfBlocksError(f"%{node.name} combines rows that are cut differently", node)
        for source in given:
            if source in self._blocks:
                continue
            if not _is_number(source):
                raise NotOfBlocksError(f"%{node.name} combines rows with a whole tensor", node)
            if source not in self._same:
                text = f"%{node.name} reads %{source.name}, which may differ between ranks"
                raise NotOfBlocksError(text, node)

    def _compute_entries(self, node: fx.Node) -> None:
        given = arguments_by_name(node.target, node.args, node.kwargs)
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
        """Translates entries of unaligned length with one call for each rank."""
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
