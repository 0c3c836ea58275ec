"""Translation of a graph in the executable dialect back to the captured dialect.

    a = mul_(m, 0.9)                         a = mul(m, 0.9)
    p = add_(p, g)                 ==>       b = add(p, g);  c = copy_(p, b)
    _fused_adam_([q], [g], ...)              f = _fused_adam([q], [g], ...);  copy_(q, f[0][0])

Nodes are read in running order. An in-place operator stands for its functional twin
(`graphopt.verify.symbolic.functional`), its readers read the twin's value, and what state holds at
the end is copied there. The resulting graph is compared like any other. Refused is what the
captured dialect cannot express: a value that is read, sent or returned after another node has
overwritten it, and a write to anything but one dense value that the graph alone owns.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _compat
from graphopt.graph_utils import lies_apart, same_kind
from graphopt.ir import inplace
from graphopt.ir.effects import Effects
from graphopt.ir.entries import list_call
from graphopt.ir.metadata import has_value, known_value, set_value
from graphopt.ir.operators import (
    is_copy,
    is_wait,
    operator_of,
    overwritten,
    rounds_a_list_in_place,
    written,
    written_positions,
)
from graphopt.ir.outputs import follows_output_convention, get_outputs
from graphopt.ir.views import holds_several, is_pure_view, launch_of
from graphopt.ir.writing_operators import FunctionalForm, form_of
from graphopt.verify.problems import Problem
from graphopt.verify.symbolic.functional import functional_form, functional_form_for

aten = torch.ops.aten


class ReadGraph(NamedTuple):
    """A graph of the executable dialect, translated to the captured one.

    Attributes:
        graph: the translated graph, for reading only.
        copies: node of the original -> translated node.
        problems: operations that no captured graph can express.
    """

    graph: fx.Graph
    copies: dict[fx.Node, fx.Node]
    problems: list[Problem]


def works_in_place(graph: fx.Graph) -> bool:
    """True if a graph contains operators of the executable dialect."""
    return any(map(_is_of_the_dialect, graph.nodes))


def _is_of_the_dialect(node: fx.Node) -> bool:
    return bool(operator_of(node).writes) and not is_copy(node)


def is_finalized(graph: fx.Graph, correspondence: Mapping[fx.Node, fx.Node]) -> bool:
    """True if `graph` may result from finalizing another graph: its in-place operators were
    functional, or on lists, there."""
    writers = filter(_is_of_the_dialect, graph.nodes)
    return all(node in correspondence or operator_of(node).listed for node in writers)


def as_captured(graph: fx.Graph, correspondence: Mapping[fx.Node, fx.Node]) -> ReadGraph:
    """Translates a graph of the executable dialect to the captured one.

    Args:
        graph: in topological order.
        correspondence: node of the graph -> node of the captured graph that it was made from.
    """
    reading = _Reading(graph, correspondence)
    reading.run()
    return ReadGraph(reading.graph, reading.copies, reading.problems)


class _Storages:
    """The last write to each storage, and the tensors that hold it.

    A *tensor* is named by the first node that is it: what an operator gives that works in place is
    what it was given.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._effects = Effects(graph)
        self._tensors: dict[fx.Node, fx.Node] = {}
        self._writes: dict[object, list[fx.Node]] = defaultdict(list)
        self._born: dict[fx.Node, dict[object, int]] = {}
        self.constants = {key for n in graph.find_nodes(op="get_attr") for key in self.keys(n)}
        self._last: dict[object, fx.Node] = {}
        self._values: dict[fx.Node, fx.Node] = {}
        self.key = self._effects.key

    def keys(self, node: fx.Node) -> list[object]:
        """Returns the storages of a node, or of the tensors in its list."""
        return self._effects.keys(node)

    def tensor(self, node: fx.Node) -> fx.Node:
        """Returns the representative node of a node's tensor."""
        return self._tensors.get(node, node)

    def add(self, node: fx.Node, was: fx.Node | None = None) -> None:
        """Registers a node behind all earlier ones; `was` is the node of the same tensor, if
        any."""
        if was is None and is_pure_view(node) and _is_all_of(node, node.all_input_nodes[0]):
            was = node.all_input_nodes[0]
        if was is not None:
            self._tensors[node] = self.tensor(was)
        self._born[node] = self.counts(node)
        if operator_of(node).item:  # it is as old as the list
            there = self._born[node.all_input_nodes[0]]
            self._born[node] = {key: there.get(key, n) for key, n in self._born[node].items()}

    def counts(self, node: fx.Node) -> dict[object, int]:
        """Returns the number of writes so far to each storage of a node."""
        return {key: len(self._writes[key]) for key in self.keys(node)}

    def write(self, writer: fx.Node | None, node: fx.Node, value: fx.Node) -> None:
        """Records that a tensor now holds `value`. `writer`: None for a `copy_` of the captured
        graph."""
        tensor, key = self.tensor(node), self.key(node)
        if writer is not None:
            self._writes[key].append(writer)
        self._last[key] = tensor
        self._values[tensor] = value

    def now(self, node: fx.Node) -> fx.Node | None:
        """Returns the node whose value was last written to a tensor. None if nothing was since the
        node ran."""
        tensor = self.tensor(node)
        return self._values.get(tensor) if self._last.get(self.key(node)) is tensor else None

    def is_written(self, node: fx.Node) -> bool:
        """True if the storage of a node has been written since the node ran."""
        return self.counts(node) != self._born[node]

    def overwriting(self, node: fx.Node) -> fx.Node | None:
        """Returns the node that overwrote the value of another one through a different tensor, or
        None."""
        if not self.is_written(node) or self.now(node) is not None:
            return None
        return next(self._writes[key][-1] for key in self.keys(node) if self._writes[key])


class _Reading:
    """Translates one graph, as the module's docstring says."""

    def __init__(self, graph: fx.Graph, correspondence: Mapping[fx.Node, fx.Node]) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.problems: list[Problem] = []
        self._given, self._was = graph, correspondence
        self._storages = _Storages(graph)
        self._sent: dict[fx.Node, dict[fx.Node, dict[object, int]]] = {}

    def run(self) -> None:
        """Translates all nodes, in order."""
        for node in self._given.nodes:
            if node.op == "output":
                self._end(node)
                return
            if is_wait(node):
                self._check_not_sent(launch_of(node), node)
            if operator_of(node).collective and operator_of(node).reads_until_wait:
                self._sent[node] = {n: self._storages.counts(n) for n in node.all_input_nodes}
            if overwritten(node):
                self._write(node)
            else:
                self._copy(node)
                self._storages.add(node)

    def _value(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Returns the captured node that a node stands for when `reader` reads it."""
        if operator_of(reader).item and holds_several(source):
            return self.copies[source]  # what is picked is looked at when it is read
        by = self._storages.overwriting(source)
        if by is not None and by is not reader:
            verb = "returns" if reader.op == "output" else "reads"
            self._wrong(
                f"%{reader.name} {verb} %{source.name} after %{by.name} has overwritten it",
                (reader, by),
            )
        if is_pure_view(source) and not self._storages.is_written(source):
            return self.copies[source]  # which reads what was there when it was made
        return self._storages.now(source) or self.copies[source]

    def _copy(self, node: fx.Node, target: Any = None) -> fx.Node:
        values = {source: self._value(source, node) for source in node.all_input_nodes}
        copy = self.graph.node_copy(node, values.__getitem__)
        if target is not None:
            copy.target = target
        self.copies[node] = copy
        return copy

    # ----------------------------------------------------------------------------------- writes

    def _write(self, node: fx.Node) -> None:
        was = self._was.get(node)
        target = node.target
        form = form_of(target)
        if form is not None:
            self._called_again(node, form)
            return
        if was is None or was.target != target:
            target = self._twin(node, was)
            self._check_write(node)
        elif is_copy(node):
            self._copy_to(node)
            return
        copy = self._copy(node, target)
        destinations = written(node)
        call = list_call(node)
        if call is not None and operator_of(node).listed:
            self._storages.add(node)
            several = len(operator_of(copy).aliases) > 1
            for position in written_positions(node):
                for index, source in enumerate(call.lists.get(position, ())):
                    path = (position, index) if several else (index,)
                    self._storages.write(node, source, self._item(copy, path, source))
        elif len(destinations) == 1:
            self._storages.write(node, destinations[0], copy)
            self._storages.add(node, destinations[0])
        else:
            self._wrong(f"%{node.name} updates several tensors", (node,))
            self._storages.add(node)

    def _called_again(self, node: fx.Node, form: FunctionalForm) -> None:
        """Translates a call of a user's operator to its functional form."""
        self._check_write(node)
        copy = self._copy(node, form.functional)
        set_value(copy, form.value_for(node))
        for path, source in form.entries(node):
            self._storages.write(node, source, self._item(copy, path, source))
        self._storages.add(node)
        if form.gives_one:
            self.copies[node] = self._item(copy, (0,), node)

    def _copy_to(self, node: fx.Node) -> None:
        """Translates a `copy_` of the captured graph to a copy into the input."""
        destination, value = node.args[0], node.args[1]
        assert isinstance(destination, fx.Node) and isinstance(value, fx.Node)
        tensor = self._storages.tensor(destination)
        values = {destination: self.copies[tensor], value: self._value(value, node)}
        for source in node.all_input_nodes:
            values.setdefault(source, self._value(source, node))
        self.copies[node] = self.graph.node_copy(node, values.__getitem__)
        self._storages.write(None, destination, self.copies[node])
        self._storages.add(node, destination)

    def _twin(self, node: fx.Node, was: fx.Node | None) -> Any:
        """Returns the functional operator that an in-place one stands for."""
        if not isinstance(node.target, _compat.OpOverload):
            return node.target
        if was is not None and (was.target, node.target) in inplace.INPLACE.items():
            return was.target
        value = known_value(written(node)[0]) if written(node) else None
        found = functional_form(node.target)
        if isinstance(value, torch.Tensor):
            found = functional_form_for(node.target, value)
        several = known_value(node)
        if isinstance(several, (list, tuple)) and rounds_a_list_in_place(node.target, several):
            found = None
        if found is None:
            self._wrong(f"%{node.name} computes bits that no functional operator gives", (node,))
        return found

    def _item(self, copy: fx.Node, path: tuple[int, ...], like: fx.Node) -> fx.Node:
        for index in path:
            held = known_value(copy)
            copy = self.graph.call_function(operator.getitem, (copy, index))
            if isinstance(held, (list, tuple)) and index < len(held):
                set_value(copy, held[index])
        if not has_value(copy) and has_value(like):
            set_value(copy, known_value(like))
        return copy

    def _check_write(self, node: fx.Node) -> None:
        """Checks that a write overwrites one dense value that the graph owns, of the result's
        kind."""
        storages = self._storages
        leaves = _compat.tree_leaves((node.args, node.kwargs))
        given = Counter(leaf for leaf in leaves if isinstance(leaf, fx.Node))
        shared = Counter(key for source in given for key in storages.keys(source))
        for source in overwritten(node):
            why, value = None, known_value(source)
            if isinstance(value, torch.Tensor) and not lies_apart(value):
                why = "elements of which share memory"
            elif storages.key(source) in storages.constants:
                why = "a constant of the module"
            elif shared[storages.key(source)] > 1:
                why = "the memory of which another argument has"
            elif given[source] > 1 and not operator_of(node).pointwise:
                why = "which it is given twice"
            elif self._differs_in_kind(node, source):
                why = "which is of another kind than its result"
            if why is not None:
                self._wrong(f"%{node.name} overwrites %{source.name}, {why}", (node, source))

    @staticmethod
    def _differs_in_kind(node: fx.Node, source: fx.Node) -> bool:
        """True if a node's result differs in shape, dtype or layout from the tensor that it
        overwrites."""
        one = isinstance(known_value(node), torch.Tensor) and form_of(node.target) is None
        return one and not same_kind(node, source)

    # -------------------------------------------------------------------------------------- end

    def _check_not_sent(self, launch: fx.Node | None, end: fx.Node) -> None:
        """Checks that no write changes what a collective sends before its wait."""
        for source, count in self._sent.pop(launch, {}).items() if launch is not None else ():
            if self._storages.counts(source) != count:
                self._wrong(
                    f"%{end.name} still sends %{source.name} when it was overwritten", (end, source)
                )

    def _end(self, node: fx.Node) -> None:
        for launch in list(self._sent):
            self._check_not_sent(launch, node)
        if not follows_output_convention(self._given):
            self._copy(node)
            return
        outputs = get_outputs(self._given)
        updates = [*(self.copies[update] for update in outputs.updates), *self._updates()]
        results, carried = (
            [self._value(v, node) if isinstance(v, fx.Node) else v for v in values]
            for values in (outputs.results, outputs.carried)
        )
        self.graph.output((results, updates, carried))

    def _updates(self) -> Iterator[fx.Node]:
        """Yields copies of what inputs hold at the end, for later readers."""
        for source in self._given.find_nodes(op="placeholder"):
            by, value = self._storages.overwriting(source), self._storages.now(source)
            if by is not None:
                self._wrong(f"%{by.name} overwrites a part of %{source.name}", (by, source))
            if value is None or is_copy(value):
                continue
            with self.graph.inserting_after(value):
                copy = self.graph.call_function(aten.copy_.default, (self.copies[source], value))
            copy.meta.update(source.meta)
            value.replace_all_uses_with(copy)
            copy.update_arg(1, value)
            self._storages.write(None, source, copy)
            yield copy

    def _wrong(self, message: str, nodes: tuple[fx.Node, ...]) -> None:
        self.problems.append(
            Problem(
                message,
                nodes,
                "read before it is overwritten, or let the operator work out of place",
            )
        )


def _is_all_of(node: fx.Node, source: fx.Node) -> bool:
    """True if a view covers all elements of its source at the same positions."""
    if not same_kind(node, source):
        return False
    value, whole = known_value(node), known_value(source)
    strided = value.layout is torch.strided
    return not strided or bool(value.storage_offset() == whole.storage_offset())
