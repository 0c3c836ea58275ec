"""The executable dialect: updates in place, storage reused, small operators batched.

The captured dialect makes a new tensor for every value. Here an operator writes into its first
argument where nobody can tell: no two elements of it share memory, its storage belongs to the graph
alone, and nobody reads it afterwards. Parameters and state are updated in place the same way, which
removes their `copy_`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from graphopt import _compat
from graphopt.executable.batching import batch_small_operators
from graphopt.graph_utils import (
    Outputs,
    call_function_with_meta,
    get_outputs,
    is_dense,
    is_operator,
    is_pointwise,
    lies_apart,
    same_kind,
    set_outputs,
)
from graphopt.graph_utils.cleaning import replace_all
from graphopt.ir.effects import Effects
from graphopt.ir.entries import ListCall, list_call
from graphopt.ir.inplace import inplace_form
from graphopt.ir.metadata import fake_value, known_value
from graphopt.ir.operators import argument, fused_in_place, fused_optimizer, updated_lists
from graphopt.ir.writing_operators import FunctionalForm, call_original, form_behind

aten = torch.ops.aten


def finalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Converts a graph from the captured to the executable dialect, as a copy.

    Args:
        graph_module: left as it is.

    Returns:
        A module that takes and gives the same, and overwrites what the captured graph copies into.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    result = _compat.lazy_graph_module(graph_module, graph)
    batch_small_operators(result.graph)
    _StorageReuse(result.graph).run()
    result.graph.lint()
    result.recompile()
    return result


class _ReadCounts(NamedTuple):
    """The number of reads of each node, and of each alias class, by an operator."""

    nodes: Counter[fx.Node]
    storages: Counter[object]


class _StorageReuse:
    """Rewrites one graph to update tensors in place and to reuse storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._effects = Effects(graph)
        self._outputs = get_outputs(graph)
        self._counted: tuple[fx.Node | None, _ReadCounts] = (
            None,
            _ReadCounts(Counter(), Counter()),
        )
        self._finals = {copy.args[1]: copy.args[0] for copy in self._outputs.updates}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if fused_optimizer(node.target) is not None:
                self._reuse_in_fused(node)
            elif (form := form_behind(node.target)) is not None:
                self._call_again(node, form)
            elif is_operator(node.target, "aten::clone"):
                self._drop_clone(node)
            else:
                self._reuse(node)
        self._drop_copies()

    def _reuse(self, node: fx.Node) -> None:
        written = inplace_form(node.target, known_value(node))
        if written is None:
            return
        pairs = list(_overwritten(node))
        if not pairs or not all(self._may_overwrite(node, *pair) for pair in pairs):
            return
        node.target = written
        self._take_over(node, pairs)

    def _take_over(self, node: fx.Node, pairs: Iterable[tuple[fx.Node, Sequence[fx.Node]]]) -> None:
        """Records that each source now holds the value of its results."""
        replaced: dict[fx.Node, fx.Node] = {}
        for source, results in pairs:
            for result in results:
                self._effects.join(source, result)
                if result is not node:
                    self._ends_in(source, result)
                    replaced[result] = source
        replace_all(replaced)
        for result in replaced:
            self._graph.erase_node(result)

    def _ends_in(self, source: fx.Node, result: fx.Node) -> None:
        """Records that `source` becomes the state that `result` becomes."""
        if result in self._finals:
            self._finals.setdefault(source, self._finals[result])

    def _may_overwrite(self, node: fx.Node, source: fx.Node, results: Sequence[fx.Node]) -> bool:
        effects = self._effects
        if not all(same_kind(source, result) for result in results):
            return False
        if not lies_apart(fake_value(source)):
            return False
        if effects.old_read_after(source, node) or effects.leaves_the_graph(source):
            return False
        arguments = self._arguments(node)
        if arguments.storages[effects.key(source)] > 1:
            return False
        if arguments.nodes[source] > 1 and not is_pointwise(node.target):
            return False
        owner = effects.input_of(source)
        if owner is None:
            return True
        if any(effects.leaves_the_graph(result) for result in results):
            return False  # the user would get the live tensor, which the next step overwrites
        return same_kind(owner, source) and any(self._becomes(r, owner) for r in results)

    def _arguments(self, node: fx.Node) -> _ReadCounts:
        """The arguments of `node`, counted once for all queries."""
        if self._counted[0] is not node:
            leaves = _compat.tree_leaves((node.args, node.kwargs))
            nodes = Counter(leaf for leaf in leaves if isinstance(leaf, fx.Node))
            self._counted = node, _ReadCounts(nodes, Counter(map(self._effects.key, nodes)))
        return self._counted[1]

    def _becomes(self, value: fx.Node, owner: fx.Node) -> bool:
        """True if the state `owner` is updated to `value`, or to a value that overwrites it."""
        while True:
            if self._finals.get(value) is owner:
                return True
            users = [user for user in value.users if user.op != "output"]
            if not users:
                return False
            last = max(users)
            again = form_behind(last.target) is not None
            if not again and inplace_form(last.target, known_value(last)) is None:
                return False
            following = [results for source, results in _overwritten(last) if source is value]
            if not following or not following[0]:
                return False
            value = following[0][0]

    def _reuse_in_fused(self, node: fx.Node) -> None:
        """Makes a fused optimizer work in place; clones what must not be overwritten."""
        name = fused_optimizer(node.target)
        assert name is not None
        call = list_call(node)
        assert call is not None and call.read_by_entry
        args = list(node.args)
        for position in updated_lists(name, argument(node, "grad_scale")):
            args[position] = [self._own(node, *entry) for entry in _entries(call, position)]
        node.args = tuple(args)
        node.target = fused_in_place(node.target)
        lists = list(node.users)
        pairs = []
        for leaf in (leaf for each in lists for leaf in each.users):
            place, index = cast(fx.Node, leaf.args[0]).args[1], leaf.args[1]
            assert isinstance(place, int) and isinstance(index, int)
            pairs.append((cast(Any, args[place])[index], [leaf]))
        self._take_over(node, pairs)
        for each in lists:
            self._graph.erase_node(each)

    def _own(self, node: fx.Node, source: fx.Node, results: Sequence[fx.Node]) -> fx.Node:
        return source if self._may_overwrite(node, source, results) else self._cloned(source, node)

    def _call_again(self, node: fx.Node, form: FunctionalForm) -> None:
        """Restores the in-place call of a user's operator; clones what must not be overwritten."""
        if not form.is_callable_again or not form.is_read_by_entry(node):
            return
        pairs = list(_overwritten(node))
        may = {source: self._may_overwrite(node, source, results) for source, results in pairs}
        if not all(free or is_dense(fake_value(source)) for source, free in may.items()):
            return  # a clone would have other strides
        own = {s: s if free else self._cloned(s, node) for s, free in may.items()}
        for item in form.holders(node, (0,)) if form.gives_one else ():
            self._effects.join(node, item)  # which the node is from now on
        call_original(node, form, own)
        for source, results in pairs:
            if results == [node]:  # what it gives itself is another thing, or nothing
                self._effects.join(own[source], node)
                self._ends_in(own[source], node)
                node.replace_all_uses_with(own[source])
        held = [(own[source], results) for source, results in pairs if results != [node]]
        self._take_over(node, held)
        for item in [each for each in node.users if each.op != "output" and not each.users]:
            self._graph.erase_node(item)

    def _cloned(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        with self._graph.inserting_before(reader):
            clone = call_function_with_meta(self._graph, aten.clone.default, (source,), like=reader)
        self._effects.insert(clone, before=reader)
        return clone

    def _drop_clone(self, node: fx.Node) -> None:
        """Replaces a clone by its source if nobody reads the source afterwards."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        owned = self._effects.input_of(source) is None and _is_whole(fake_value(source))
        if owned and self._may_overwrite(node, source, [node]):
            self._effects.join(source, node)
            node.replace_all_uses_with(source)
            self._graph.erase_node(node)

    def _drop_copies(self) -> None:
        """Drops each `copy_` whose value is in its destination already."""
        dropped: dict[Any, fx.Node] = {}
        for copy in self._outputs.updates:
            destination, value = copy.args
            assert isinstance(destination, fx.Node) and isinstance(value, fx.Node)
            if self._effects.same(destination, value) and same_kind(destination, value):
                dropped[copy] = value
        outputs = get_outputs(self._graph)
        # All at once: the output is long, and each change of its arguments goes through them.
        results = [dropped.get(value, value) for value in outputs.results]
        updates = [copy for copy in outputs.updates if copy not in dropped]
        carried = [dropped.get(value, value) for value in outputs.carried]
        set_outputs(self._graph, Outputs(results, updates, carried))
        for copy, value in dropped.items():
            copy.replace_all_uses_with(value)
            self._graph.erase_node(copy)


def _is_whole(value: torch.Tensor) -> bool:
    """True if a tensor is the whole of its storage, so that keeping it keeps nothing else."""
    if value.layout is not torch.strided:
        return True
    if _compat.has_symbolic_shape(value):
        return False
    return value.untyped_storage().nbytes() == value.nbytes


def _overwritten(node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The tensors that the in-place form of `node` writes, with the nodes that hold the results."""
    first, form = node.args[0] if node.args else None, form_behind(node.target)
    if form is not None:
        yield from ((source, form.holders(node, path)) for path, source in form.entries(node))
    elif isinstance(first, fx.Node):
        yield first, [node]
    elif (call := list_call(node)) and call.read_by_entry:
        yield from _entries(call, 0)


def _entries(call: ListCall, position: int) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The tensors of one list argument, with the nodes that hold their results at the same
    position."""
    results = call.results(position)
    for index, source in enumerate(call.lists.get(position, ())):
        yield source, results.get(index, [])
