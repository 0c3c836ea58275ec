"""Rewrites a captured graph node by node so that each rank computes only with its own rows.

    mean  = reduce_gradient(g, "w")          part  = this rank's rows of the mean       (scatter)
    m2    = lerp(m, mean, 0.1)               m2    = lerp(m, part, 0.1)                 (rows)
    new   = addcdiv(w, m2, d)                rows  = addcdiv(window(w), m2, d)          (rows)
    w    <- copy_(w, new)                    w    <- copy_(w, gathered(rows))           (gather)

Elementwise operators, and the entries of list operators, act on rows; norms are partial sums and
one all-reduce for all that are taken together (`shard_norms`). Any other operator gets the whole of
what it reads. What a rank holds of a value is its window (`graphopt.parallel.sharding`), flat.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import is_copy, is_list_operator
from graphopt.host.decisions.assumptions import Assumption
from graphopt.ir.entries import list_positions
from graphopt.ir.metadata import fake_value, input_kind, phase_of, set_value
from graphopt.ir.operators import is_marker, operator_of
from graphopt.ir.placement import placement_of
from graphopt.ir.rows import RowShards
from graphopt.ir.views import is_pure_view
from graphopt.parallel.data_parallel import average, receive_buffers, summed
from graphopt.parallel.kept_parameters import is_cast, kept_parameters
from graphopt.parallel.markers import Group, Nodes, group_of, marks_gradient, replace_marker
from graphopt.parallel.row_operators import (
    goes_along,
    has_shape_of,
    is_elementwise,
    is_reducing,
    written_elementwise,
)
from graphopt.parallel.shard_communication import gathered, part_of, scattered
from graphopt.parallel.shard_norms import Norms
from graphopt.parallel.shard_views import average_behind_views, cancel_views
from graphopt.parallel.sharding import shards_of


class Expansion:
    """Rewrites one graph with markers for sharded computation.

    Args:
        group: the ranks over which values are sharded.
        keep_bytes: of parameters that the backward does not gather again
            (`graphopt.parallel.kept_parameters`).
        replicas: the ranks that have the same rows as this one; None where there are no others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        group: Group,
        keep_bytes: float | None = None,
        replicas: Group | None = None,
    ) -> None:
        self._graph, self._group, self._replicas = graph, group, replicas
        self._kept = kept_parameters(graph, keep_bytes)
        self._rows: dict[fx.Node, RowShards] = {}
        self._items: dict[fx.Node, Any] = {}
        self._wholes: dict[tuple[fx.Node, str], fx.Node] = {}
        self._parts: dict[fx.Node, fx.Node] = {}
        self._derived: set[fx.Node] = set()
        self._parameters: set[fx.Node] = set()
        self._written: set[fx.Node] = set()
        self._sources: dict[fx.Node, fx.Node] = {}
        self._norms = Norms(group)

    def run(self) -> int:
        """Rewrites the graph. Returns how many markers there were."""
        markers = 0
        cancel_views(self._graph)
        self._written = written_elementwise(self._graph)
        for node in list(self._graph.nodes):
            if is_marker(node) and marks_gradient(node):
                average_behind_views(node)
        for node in list(self._graph.nodes):
            if node.op == "placeholder":
                self._cut(node)
            elif is_marker(node):
                self._expand(node)
                markers += 1
            elif node.op == "output":
                self._finish(node)
            elif node.op == "call_function":
                self._rewrite(node)
        return markers

    def _cut(self, node: fx.Node) -> None:
        """Gives a sharded placeholder the shape of this rank's window."""
        if placement_of(node).rows is None:
            return
        whole = fake_value(node)
        shards = RowShards(tuple(whole.shape), self._group.ranks)
        set_value(node, whole.new_empty(shards.length))
        self._rows[node] = shards
        if input_kind(node) == "parameter":
            self._parameters.add(node)

    def _computes_with_parameters(self, node: fx.Node) -> bool:
        """True if a node of forward or backward needs whole parameters. Casts do not, so that fewer
        bytes are gathered, nor does elementwise work that goes into state, such as an average."""
        if phase_of(node) not in ("forward", "backward"):
            return False
        if self._parameters.isdisjoint(node.all_input_nodes):
            return False
        if is_cast(node):
            self._parameters.add(node)
            return False
        return node not in self._written

    def _expand(self, marker: fx.Node) -> None:
        make = Nodes(marker)
        source: Any = marker.args[0]
        if not marks_gradient(marker):
            replace_marker(marker, receive_buffers(source, group_of(marker), make))
            return
        source = self._whole(source, marker)
        shards = shards_of(fake_value(marker), self._group.ranks)
        if shards is None:
            replace_marker(marker, average(source, group_of(marker), make))
            return
        part = scattered(make, source, shards, self._group, group_of(marker).ranks)
        if self._replicas is not None:
            part = summed(part, self._replicas, make)
        self._rows[part] = shards
        replace_marker(marker, part)

    def _finish(self, output: fx.Node) -> None:
        """Makes user results and carried values whole; state updates stay as they are."""
        self._norms.settle_inputs(output)
        results, updates, carried = cast(Any, output.args[0])
        wholes = [[self._whole(node, output) for node in given] for given in (results, carried)]
        output.args = ((wholes[0], updates, wholes[1]),)

    def _rewrite(self, node: fx.Node) -> None:
        self._norms.settle_inputs(node)
        if node.target is operator.getitem and (self._norms.pick(node) or self._pick(node)):
            return
        if phase_of(node) != "forward":
            self._again(node)
        inputs = node.all_input_nodes
        if not any(map(self._rows.__contains__, inputs)):
            if any(map(self._derived.__contains__, inputs)):
                self._note_view(node)
            return
        if is_copy(node):
            self._write(node)
        elif self._computes_with_parameters(node):
            self._note_view(node)
            self._give_wholes(node)
        elif self._norms.is_norm(node):
            self._norms.take(node, self._rows)
        elif is_list_operator(node) and not is_reducing(node):
            self._rewrite_entries(node)
        elif operator_of(node).metadata_only and not str(node.target).count("_like"):
            return
        elif is_elementwise(node) and (shards := self._common(node, inputs)):
            self._rows_of(node, shards)
        else:
            self._give_wholes(node)

    def _note_view(self, node: fx.Node) -> None:
        """Records a view of a gathered parameter, or of another such view."""
        inputs = node.all_input_nodes
        if len(inputs) == 1 and is_pure_view(node):
            self._derived.add(node)
            self._sources[node] = inputs[0]

    def _pick(self, node: fx.Node) -> bool:
        """Handles an item of a list operator's result. Returns whether items are sharded."""
        source: Any = node.args[0]
        items = self._items.get(source)
        if items is None:
            return False
        found = items[cast(int, node.args[1])]
        if isinstance(found, RowShards):
            self._rows[node] = found
        elif found is not None:
            self._items[node] = found
        set_value(node, fake_value(source)[node.args[1]])
        return True

    def _write(self, node: fx.Node) -> None:
        """Handles an update of a placeholder, by rows or as a whole."""
        destination, value = cast(tuple[fx.Node, fx.Node], node.args[:2])
        shards = self._rows.get(destination)
        if shards is None:
            node.args = (destination, self._whole(value, node), *node.args[2:])
            return
        if self._rows.get(value) != shards:
            value = self._part(self._whole(value, node), shards, node)
        node.args = (destination, value, *node.args[2:])
        self._rows_of(node, shards)

    def _rows_of(self, node: fx.Node, shards: RowShards) -> None:
        """Makes a node compute rows: its operands become windows or single numbers."""
        for source in node.all_input_nodes:
            if source not in self._rows and has_shape_of(source, shards):
                node.replace_input_with(source, self._part(source, shards, node))
        set_value(node, _window_like(fake_value(node), shards))
        self._rows[node] = shards

    def _give_wholes(self, node: fx.Node) -> None:
        """Gives a node whole operands. An assumption keeps the state that it reads so that nothing
        has overwritten it: of that, what this rank holds."""
        kept = "placeholder" if isinstance(node.target, Assumption) else ""
        for source in node.all_input_nodes:
            if source in self._rows and source.op != kept:
                node.replace_input_with(source, self._whole(source, node))

    def _common(self, node: fx.Node, inputs: list[fx.Node]) -> RowShards | None:
        """The sharding that all operands and the result share, or None if they differ."""
        found = {self._rows[source] for source in inputs if source in self._rows}
        if len(found) != 1:
            return None
        (shards,) = found
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shards.shape:
            return None
        others = (source for source in inputs if source not in self._rows)
        return shards if all(goes_along(source, shards) for source in others) else None

    def _rewrite_entries(self, node: fx.Node) -> None:
        """Makes each entry of a list operator compute on rows or on whole tensors."""
        args = list(node.args)
        names = [argument.name for argument in _compat.schema_of(node.target).arguments]
        kwargs = dict(node.kwargs)
        lists: dict[int | str, list[Any]] = {}
        for position in list_positions(node.target):
            at: int | str = position if position < len(args) else names[position]
            value = args[position] if position < len(args) else kwargs.get(names[position])
            if isinstance(value, fx.Node):
                value = self._unpacked(value, node)
            if isinstance(value, (list, tuple)) and value:
                lists[at] = list(value)
        count = len(next(iter(lists.values())))
        cut = [self._entry(node, lists, index) for index in range(count)]
        for at, values in lists.items():
            if isinstance(at, int):
                args[at] = values
            else:
                kwargs[at] = values
        node.args, node.kwargs = tuple(args), kwargs
        self._note_items(node, cut)

    def _entry(
        self, node: fx.Node, lists: dict[int | str, list[Any]], index: int
    ) -> RowShards | None:
        """Gives one list entry windows or whole tensors. Returns how it is cut."""
        given = [values[index] for values in lists.values() if len(values) > index]
        tensors = [value for value in given if isinstance(value, fx.Node)]
        found = {self._rows[value] for value in tensors if value in self._rows}
        shards = next(iter(found)) if len(found) == 1 else None
        others = [value for value in tensors if value not in self._rows]
        if shards and not all(goes_along(each, shards) for each in others):
            shards = None
        for values in lists.values():
            value = values[index] if len(values) > index else None
            if not isinstance(value, fx.Node):
                continue
            if shards is None:
                values[index] = self._whole(value, node)
            elif value not in self._rows and has_shape_of(value, shards):
                values[index] = self._part(value, shards, node)
        return shards

    def _note_items(self, node: fx.Node, cut: list[RowShards | None]) -> None:
        """Records which items of a result are rows, and their sharding."""

        value = fake_value(node)
        several = bool(value) and isinstance(value[0], (list, tuple))
        columns = value if several else [value]
        items = [
            [
                shards if shards and tuple(each.shape) == shards.shape else None
                for each, shards in zip(column, cut, strict=False)
            ]
            for column in columns
        ]
        new = [
            type(column)(
                _window_like(each, shards) if shards else each
                for each, shards in zip(column, found, strict=False)
            )
            for column, found in zip(columns, items, strict=True)
        ]
        self._items[node] = items if several else items[0]
        set_value(node, type(value)(new) if several else new[0])

    def _unpacked(self, source: fx.Node, reader: fx.Node) -> list[fx.Node]:
        """Inserts the items of a list as nodes."""
        count = len(fake_value(source))
        with self._graph.inserting_before(reader):
            items = [self._graph.call_function(operator.getitem, (source, i)) for i in range(count)]
        for index, item in enumerate(items):
            item.meta = dict(reader.meta)
            set_value(item, fake_value(source)[index])
            self._pick(item)
        return items

    def _whole(self, node: Any, reader: fx.Node) -> Any:
        """The whole (gathered) value of a node, for a reader."""
        if node not in self._rows:
            return node
        phase = "all" if self._is_kept(node) else str(phase_of(reader))
        found = self._wholes.get((node, phase))
        if found is None:
            make = Nodes(reader, "communication")
            found = gathered(make, node, self._rows[node], self._group)
            self._wholes[node, phase] = found
        return found

    def _is_kept(self, node: fx.Node) -> bool:
        """True if a gathered parameter, or a cast of one, is kept for the backward."""
        return node in self._kept or any(map(self._kept.__contains__, node.all_input_nodes))

    def _part(self, node: fx.Node, shards: RowShards, reader: fx.Node) -> fx.Node:
        """This rank's window of a value that all ranks have whole, for a reader."""
        found = self._parts.get(node)
        if found is None:
            found = self._parts[node] = part_of(Nodes(reader), node, shards, self._group)
        return found

    def _again(self, node: fx.Node) -> None:
        """Gives a backward node views of parameters that are gathered for the backward."""
        for source in node.all_input_nodes:
            if self._is_gathered_again(source):
                node.replace_input_with(source, self._view_again(source, node))

    def _view_again(self, view: fx.Node, reader: fx.Node) -> fx.Node:
        """Repeats a forward's view of a gathered parameter in another phase."""
        key = view, str(phase_of(reader))
        if key not in self._wholes:
            base = self._sources[view]
            if base in self._derived:
                source = self._view_again(base, reader)
            else:
                source = self._whole(base, reader)
            args = fx.node.map_arg(view.args, lambda each: source)
            self._wholes[key] = Nodes(reader)(view.target, *args, **view.kwargs)
        return self._wholes[key]

    def _is_gathered_again(self, view: fx.Node) -> bool:
        """True if a value is a forward's view of a parameter that the backward gathers again."""
        if view not in self._derived or phase_of(view) != "forward":
            return False
        source = view
        while source in self._sources:
            source = self._sources[source]
        return not self._is_kept(source)


def _window_like(value: torch.Tensor, shards: RowShards) -> torch.Tensor:
    """A fake tensor for this rank's window of an elementwise result."""
    return value.new_empty(shards.length)
