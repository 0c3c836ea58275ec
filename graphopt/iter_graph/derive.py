"""Derivation of the graphs that run (setup, main, drain) from one graph with late nodes.

With *late* for the late nodes and *rest* for the others:

| graph | what it runs |
|---|---|
| setup | rest |
| main | the previous iteration's late, each before its destination, and rest |
| drain | the previous iteration's late |
| cleanup | the previous iteration's late, then rest and late |

What late nodes need of their own iteration is *carried*: returned by setup and main, taken by main,
drain and cleanup. State that they update is not carried: it is read where it lives, before rest
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphopt import _compat
from graphopt.errors import IterationError
from graphopt.graph_utils import (
    Outputs,
    call_function_with_meta,
    evaluate,
    follows_output_convention,
    get_output,
    get_outputs,
    is_operator,
    written,
)
from graphopt.ir.effects import Effects
from graphopt.ir.memory_readers import values_read
from graphopt.ir.metadata import (
    KIND,
    describe_carried,
    is_state,
    known_value,
    phase_of,
    set_late_group,
    set_phase,
    set_value,
)
from graphopt.ir.operators import writers
from graphopt.iter_graph.graph import IterGraph

aten = torch.ops.aten


@dataclass
class LatePlan:
    """The carried values of a graph with late nodes, and the nodes of each derived graph.

    Attributes:
        late: late nodes in graph order.
        groups: the late nodes that run before each destination, all in graph order.
        carried: values of an iteration that its late nodes need, in graph order.
        cloned: those of them that must be copied, since others may change their storage.
        separate: no group needs what another computes.
    """

    late: list[fx.Node]
    groups: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    carried: list[fx.Node] = field(default_factory=list)
    cloned: set[fx.Node] = field(default_factory=set)
    separate: bool = True


def plan(graph: IterGraph) -> LatePlan:
    """Computes which values must be carried to the next iteration, in linear time."""
    marked = graph.late
    early: set[fx.Node] = set()
    late: list[fx.Node] = []
    for node in sorted(marked):
        if _takes_item_of_early_list(node, marked, early):
            early.add(node)
        else:
            late.append(node)
    found = LatePlan(late)
    if not late:
        return found
    inside = set(late)
    found.separate = all(
        marked[source] is marked[node]
        for node in late
        for source in node.all_input_nodes
        if source in inside
    )
    for node in late:
        found.groups.setdefault(marked[node], []).append(node)
    found.groups = {destination: found.groups[destination] for destination in sorted(found.groups)}
    updated_late = {state for node in late for state in written(node)}
    needed = {source for node in late for source in values_read(node)} - inside
    effects = Effects(graph)
    writing_now = [node for node in writers(graph) if node not in inside]
    updated_now = {state for node in writing_now for state in written(node)}
    for node in sorted(needed):
        if node.op == "get_attr" or node in updated_late:
            continue
        if _is_constant_state(node, updated_now):
            continue
        found.carried.append(node)
        if isinstance(known_value(node), (list, tuple)):
            raise IterationError(
                f"late nodes need the list %{node.name}, of which single items are wanted: move"
                " the nodes that pick from it as well, or none of them"
            )
        if not isinstance(known_value(node), torch.Tensor):
            continue
        owner = node if node.op == "placeholder" else effects.input_of(node)
        if owner is not None and owner not in updated_late:
            found.cloned.add(node)
    return found


def _takes_item_of_early_list(node: fx.Node, marked: Any, early: set[fx.Node]) -> bool:
    """True if a late node only picks from the results of a node that is not late.

    It is picked early then, so that what is carried are tensors.
    """
    if not node.all_input_nodes or node.op != "call_function":
        return False
    source = node.all_input_nodes[0]
    several = isinstance(known_value(source), (list, tuple))
    return several and len(node.all_input_nodes) == 1 and (source not in marked or source in early)


def _is_constant_state(node: fx.Node, updated_now: set[fx.Node]) -> bool:
    """True if a placeholder is state that the step only reads; whoever changes it between steps
    flushes first."""
    return is_state(node) and node not in updated_now


class Derivation:
    """Builds the derived graphs of one step."""

    def __init__(self, source: IterGraph, plan: LatePlan) -> None:
        self._source, self._plan = source, plan
        self._graph = fx.Graph()
        self._late = set(plan.late)
        self._now: dict[fx.Node, fx.Node] = {}
        self._before: dict[fx.Node, fx.Node] = {}
        self._states: dict[fx.Node, fx.Node] = {}
        self._updates: list[fx.Node] = []
        self._clones: dict[fx.Node, fx.Node] = {}
        self._carries = False

    def setup(self) -> fx.Graph:
        """Builds the graph of the first iteration, before which nothing is in flight."""
        return self._iteration(previous=False, last=False)

    def main(self) -> fx.Graph:
        """Builds the graph of every iteration but the first."""
        return self._iteration(previous=True, last=False)

    def cleanup(self) -> fx.Graph:
        """Builds the graph of the last iteration, after which nothing is in flight."""
        return self._iteration(previous=True, last=True)

    def drain(self, done: int = 0) -> fx.Graph:
        """Builds the graph of the last iteration's late nodes, without the first `done` groups.

        It takes all placeholders, but reads state only.
        """
        self._placeholders()
        self._take_carried()
        for destination in list(self._plan.groups)[done:]:
            self._previous(destination, keep_updates=True)
        self._graph.output(([], self._updates, []))
        return self._graph

    def _placeholders(self) -> None:
        for node in self._source.nodes:
            if node.op == "placeholder":
                self._now[node] = self._states[node] = _compat.copy_node(
                    self._graph, node, self._now.__getitem__
                )

    def _take_carried(self) -> None:
        for index, node in enumerate(self._plan.carried):
            taken = self._graph.placeholder(f"carried_{index}_{node.name}")
            describe_carried(taken, node, index)
            if node in self._plan.cloned:
                set_value(taken, _fresh(node))
            self._before[node] = taken

    def _iteration(self, *, previous: bool, last: bool) -> fx.Graph:
        """Builds the graph of one iteration.

        Args:
            previous: it runs the late nodes of the iteration before.
            last: it runs its own late nodes as well, and carries nothing.
        """
        self._carries = not last
        self._placeholders()
        if previous:
            self._take_carried()
        for node in list(self._now):
            self._clone_if_needed(node)
        for node in self._source.nodes:
            if previous and node in self._plan.groups:
                self._previous(node, keep_updates=not last)
            if node.op in ("placeholder", "output"):
                continue
            if last or node not in self._late:
                self._emit(node)
        return self._finish()

    def _emit(self, node: fx.Node) -> None:
        new = _compat.copy_node(self._graph, node, self._now.__getitem__)
        self._now[node] = new
        if is_operator(node.target, "aten::copy_"):
            state = node.args[0]
            assert isinstance(state, fx.Node)
            new.update_arg(0, self._states.get(state, self._now[state]))
            self._updates.append(new)
        self._clone_if_needed(node)

    def _clone_if_needed(self, node: fx.Node) -> None:
        """Clones a carried value that would be overwritten before the next iteration reads it."""
        if node in self._plan.cloned and self._carries:
            value = self._now[node]
            clone = call_function_with_meta(self._graph, aten.clone.default, (value,), like=value)
            clone.meta.pop(KIND, None)
            set_phase(clone, phase_of(clone) or "forward")
            self._clones[node] = clone

    def _previous(self, destination: fx.Node, *, keep_updates: bool) -> None:
        """Emits one group of the previous iteration's late nodes; later readers see their
        updates."""
        number = list(self._plan.groups).index(destination)
        for node in self._plan.groups[destination]:
            if is_operator(node.target, "aten::copy_") and not keep_updates:
                state, value = node.args[:2]
                assert isinstance(state, fx.Node) and isinstance(value, fx.Node)
                self._before[node] = self._now[state] = self._value_before(value)
                continue
            new = _compat.copy_node(self._graph, node, self._value_before)
            self._before[node] = new
            set_late_group(new, number)
            if is_operator(node.target, "aten::copy_"):
                state = node.args[0]
                assert isinstance(state, fx.Node)
                self._now[state] = new
                self._updates.append(new)

    def _value_before(self, node: fx.Node) -> fx.Node:
        """Returns the value that `node` had in the previous iteration."""
        if node in self._before:
            return self._before[node]
        if node.op == "get_attr":
            self._before[node] = self._graph.node_copy(node)
            return self._before[node]
        return self._now[node]

    def _finish(self) -> fx.Graph:
        outputs = get_outputs(self._source)
        if not follows_output_convention(self._source):
            leaves = _compat.tree_leaves(get_output(self._source).args[0])
            outputs = outputs._replace(results=leaves)
        results = [self._returned(value) for value in outputs.results]
        carried = [self._returned(value) for value in outputs.carried]
        if self._carries:
            carried += [self._clones.get(n, self._now[n]) for n in self._plan.carried]
        self._graph.output(tuple(Outputs(results, self._updates, carried)))
        return self._graph

    def _returned(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in self._now:
            return self._now[value]
        state = value.args[0]  # a late update: the state itself, as it is now
        assert is_operator(value.target, "aten::copy_") and isinstance(state, fx.Node)
        return self._now[state]


def _fresh(node: fx.Node) -> torch.Tensor:
    """Returns metadata like that of `node`, with storage of its own."""
    fresh: torch.Tensor = evaluate(aten.clone.default, (node,), {})
    return fresh
