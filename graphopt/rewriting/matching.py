"""Matching of a pattern graph against a graph.

A search on nodes: it begins at the operator of the pattern that is rarest in the graph, goes to
arguments and to readers, and takes a step back where two do not agree. It is run twice:

1. *roughly*, with the pattern traced for example tensors: sizes and other numbers are not compared,
   and copies (`clone`), which depend on strides, are looked through. That tells which nodes the
   parameters stand for;
2. *exactly*, with the pattern traced for the shapes, strides and dtypes of these nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.graph_utils import is_operator
from graphopt.ir.metadata import known_value, source_line
from graphopt.rewriting.patterns import Pattern
from graphopt.verify.values.call_terms import named

Binding = dict[Any, Any]
"""Pattern node, or name of a number -> the matched node or number of the graph."""

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
_DIMENSIONS = frozenset({"dim", "dim0", "dim1", "dims"})
_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern.

    Attributes:
        inputs: by parameter of the pattern, the node or the number that stands for it.
        incoming: the gradients of the results; empty without a backward side.
        results, gradients: the nodes that give these.
        nodes: all nodes of the pattern, in graph order.

    >>> def has_three_columns(match):
    ...     return match.inputs["x"].meta["val"].shape[-1] == 3
    >>> gm = graphopt.capture(lambda m, x: m(x).relu(), torch.nn.ReLU(), torch.ones(2)).graph_module
    >>> graphopt.rewrite(gm, lambda x: x.relu().relu(), lambda x: x.relu(), where=has_three_columns)
    0
    """

    inputs: Mapping[str, Any]
    incoming: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The results, followed by the gradients."""
        return (*self.results, *self.gradients)


CallsByTarget = Mapping[Any, Sequence[fx.Node]]
"""The calls of a graph by their targets, where all operators that only reshape count as one."""


def calls_by_target(graph: fx.Graph) -> CallsByTarget:
    """Returns the calls of a graph, indexed by target."""
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            found[_kind(node)].append(node)
    return found


class PatternSearch:
    """A search for one pattern.

    Args:
        numbers: by the value that stands for a number in the pattern, its name.
        exact: compare everything; otherwise neither numbers nor copies.
    """

    def __init__(
        self, pattern: Pattern, numbers: Mapping[float, str] | None = None, *, exact: bool
    ) -> None:
        self._numbers, self._exact = numbers or {}, exact
        self._targets: CallsByTarget = {}
        calls = pattern.calls
        self._calls = calls if exact else [node for node in calls if not _is_copy(node)]

    def everywhere(self, targets: CallsByTarget) -> Iterator[Binding]:
        """Yields all occurrences, in graph order of the rarest operator."""
        if not self._calls or not all(_kind(node) in targets for node in self._calls):
            return
        self._targets = targets
        rarest = min(self._calls, key=lambda node: len(targets[_kind(node)]))
        order = self._order([rarest])
        for candidate in targets[_kind(rarest)]:
            yield from self._extend(order, 0, {rarest: candidate})

    def at(self, bound: Binding) -> Binding | None:
        """Extends a partial binding of pattern nodes to an occurrence, or returns None."""
        order = self._order([node for node in bound if isinstance(node, fx.Node)])
        return next(self._extend(order, 0, dict(bound)), None)

    def _order(self, placed: Sequence[fx.Node]) -> list[fx.Node]:
        """Orders the pattern's calls so that each is connected to an earlier one, arguments
        first."""
        found = [node for node in placed if node.op == "call_function"]
        near = set(placed)
        for node in placed:
            near.update(map(self._seen, node.all_input_nodes))
        while True:
            rest = [node for node in self._calls if node not in found]
            if not rest:
                return found
            arguments = [node for node in rest if node in near]
            readers = [n for n in rest if near & set(map(self._seen, n.all_input_nodes))]
            node = (arguments or readers or rest)[0]
            found.append(node)
            near |= {node, *map(self._seen, node.all_input_nodes)}

    def _extend(self, order: Sequence[fx.Node], index: int, bound: Binding) -> Iterator[Binding]:
        if index == len(order):
            yield bound
            return
        node = order[index]
        for candidate in self._candidates(node, bound):
            for found in self._unified(node, candidate, bound):
                yield from self._extend(order, index + 1, found)

    def _candidates(self, node: fx.Node, bound: Binding) -> list[fx.Node]:
        if node in bound:
            return [bound[node]]
        taken = {value for value in bound.values() if isinstance(value, fx.Node)}
        for source in map(self._seen, node.all_input_nodes):
            if isinstance(bound.get(source), fx.Node):
                readers = self._readers(bound[source])
                return [r for r in readers if _kind(r) == _kind(node) and r not in taken]
        return [other for other in self._disconnected_candidates(node, bound) if other not in taken]

    def _disconnected_candidates(self, node: fx.Node, bound: Binding) -> list[fx.Node]:
        """Returns candidates for a disconnected part of the pattern, such as a linear function's
        backward: those from the same source line."""
        first = next(found for one, found in bound.items() if isinstance(one, fx.Node))
        line = source_line(first)
        others = self._targets.get(_kind(node), ())
        return [other for other in others if source_line(other) == line]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for user in self._seen(node).users:
            found[user] = None
            if not self._exact and _is_copy(user):
                found.update(dict.fromkeys(self._readers_of_copy(user)))
        return list(found)

    def _readers_of_copy(self, copy: fx.Node) -> Iterator[fx.Node]:
        for user in copy.users:
            yield from self._readers_of_copy(user) if _is_copy(user) else [user]

    def _seen(self, node: fx.Node) -> fx.Node:
        """Returns a node, or the source of a copy where copies are ignored."""
        while not self._exact and _is_copy(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    # ---------------------------------------------------------------------------- agreement

    def _unified(self, node: fx.Node, candidate: fx.Node, bound: Binding) -> Iterator[Binding]:
        if _kind(node) != _kind(candidate):
            return
        wanted, given = arguments_of(node), arguments_of(candidate)
        if wanted.keys() != given.keys():
            return
        for order in _orders(candidate, given):
            found = {**bound, node: candidate}
            if all(self._agree(name, wanted[name], order[name], found) for name in wanted):
                yield found

    def _agree(self, name: str, wanted: Any, given: Any, bound: Binding) -> bool:
        if isinstance(wanted, fx.Node):
            return isinstance(given, fx.Node) and self._bind(self._seen(wanted), given, bound)
        if isinstance(wanted, (list, tuple)):
            if not isinstance(given, (list, tuple)) or len(wanted) != len(given):
                return False
            return all(self._agree(name, *pair, bound) for pair in zip(wanted, given, strict=True))
        if isinstance(wanted, float) and wanted in self._numbers:
            return self._bind_number(self._numbers[wanted], given, bound)
        if isinstance(given, fx.Node):
            return False
        return self._agree_constant(name, wanted, given)

    def _agree_constant(self, name: str, wanted: Any, given: Any) -> bool:
        if self._exact or name == "1" or isinstance(wanted, (bool, str)):
            return bool(wanted == given)
        if isinstance(wanted, (int, float)):
            return isinstance(given, (int, float)) and not isinstance(given, bool)
        return type(wanted) is type(given)

    def _bind(self, node: fx.Node, given: fx.Node, bound: Binding) -> bool:
        if node.op == "call_function":
            given = self._seen(given)
        there = bound.setdefault(node, given)
        return there is given or self._seen(there) is self._seen(given)

    def _bind_number(self, name: str, given: Any, bound: Binding) -> bool:
        if isinstance(given, (fx.Node, bool)) or not isinstance(given, (int, float)):
            return False
        return bool(bound.setdefault(name, given) == given)


def match_of(pattern: Pattern, bound: Binding, numbers: Mapping[str, Any]) -> Match:
    """Converts a binding of the exact pattern to a `Match`."""
    inputs = {name: bound[node] for name, node in pattern.inputs.items()}
    return Match(
        inputs={**inputs, **numbers},
        incoming=tuple(bound[node] for node in pattern.incoming),
        results=tuple(bound[node] for node in pattern.results),
        gradients=tuple(bound[node] for node in pattern.gradients),
        nodes=tuple(sorted(bound[node] for node in pattern.calls)),
    )


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Returns a call's arguments by name, with defaults and non-negative dimensions."""
    found = named(node.target, node.args, node.kwargs)
    for name in found.keys() & _DIMENSIONS:
        found[name] = _from_first(node, found[name])
    if is_operator(node.target, "aten::transpose"):
        found["dim0"], found["dim1"] = sorted((found["dim0"], found["dim1"]))
    return found


def _from_first(node: fx.Node, value: Any) -> Any:
    source = node.args[0]
    held = known_value(source) if isinstance(source, fx.Node) else None
    if not isinstance(held, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return [v % max(held.dim(), 1) if isinstance(v, int) else v for v in value]
    return value % max(held.dim(), 1) if isinstance(value, int) else value


def _orders(node: fx.Node, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a call's arguments, and for commutative operators also the swapped ones."""
    yield given
    if node.target not in _COMMUTATIVE or given.get("alpha", 1) != 1:
        return
    if isinstance(given["other"], fx.Node):
        yield {**given, "self": given["other"], "other": given["self"]}


def _kind(node: fx.Node) -> Any:
    return "view" if is_operator(node.target, *_VIEWS) else node.target


def _is_copy(node: fx.Node) -> bool:
    return is_operator(node.target, "aten::clone")
