"""The part of a branch's graph that still has to run after another branch's graph has stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from graphopt.branches.course import Course, CourseNames
from graphopt.branches.cut import GraphCut, handed_out, in_order
from graphopt.graph_utils import call_function_with_meta, get_output, get_outputs, is_operator
from graphopt.host import is_host_call
from graphopt.host.decisions.assumptions import without_handed_out
from graphopt.ir.effects import Effects
from graphopt.ir.metadata import (
    carried_index,
    describe_carried,
    fake_value,
    input_kind,
    input_name,
    known_value,
)
from graphopt.ir.operators import draws
from graphopt.ir.views import is_pure_view
from graphopt.iter_graph import IterGraphModule, copy_graph
from graphopt.iter_graph.graph import IterGraph
from graphopt.verify.differences.outcome_differences import differences
from graphopt.verify.symbolic.callees import OF_STORAGE
from graphopt.verify.symbolic.evaluation_outcome import Evaluation, NotDecidedError
from graphopt.verify.values.terms import Terms, layout_of

Beginning = Callable[[fx.Graph], tuple[Course, dict[fx.Node, fx.Node]]]
"""What a call has done when a graph begins, and what stands for each input of the graph in it."""


def from_the_beginning(graph: fx.Graph) -> tuple[Course, dict[fx.Node, fx.Node]]:
    """Begins an empty course: a call that has computed nothing yet."""
    course = Course(CourseNames())
    return course, {node: course.add_input(node) for node in graph.find_nodes(op="placeholder")}


class NotSharedError(Exception):
    """Two branches share no computed values, or none that can be proven equal."""


@dataclass
class Continuation:
    """The part of a branch's graph that still has to run.

    Attributes:
        module: takes the inputs of the graph, and behind them what is there already.
        taken: what is there already: nodes of the graph that has come to the decision.
        begins: what a call has done when `module` begins.
        same: pairs of inputs that have to be the same in both graphs, by position.
        drawn: how many operators have drawn random numbers by then.
    """

    module: IterGraphModule
    taken: list[fx.Node]
    begins: Beginning
    same: list[tuple[int, int]]
    drawn: int


class StoppedGraph:
    """A graph that has stopped at a failed assumption.

    Args:
        graph: the step that ran, with late nodes, which have not.
        begins: what the call had done before.
        assumption: the node that failed.
    """

    def __init__(self, graph: IterGraph, begins: Beginning, assumption: fx.Node) -> None:
        self.inputs = graph.find_nodes(op="placeholder")
        self.course, self._values = begins(graph)
        ran = [n for n in graph.nodes if n < assumption and n not in graph.late]
        self.nodes = self.course.run(ran, self._values, decided=True)

    def names(self, other: IterGraph) -> tuple[dict[fx.Node, str], list[tuple[int, int]]]:
        """The names of inputs that another graph has as well, and their positions in both."""
        mine, theirs = _by_what_it_is(self.inputs), other.find_nodes(op="placeholder")
        found, same = {}, []
        for what, node in _by_what_it_is(theirs).items():
            twin = mine.get(what)
            if twin is None or not _alike(twin, node):
                continue
            found[node] = str(self._values[twin].target)
            same.append((self.inputs.index(twin), theirs.index(node)))
        return found, same


def _by_what_it_is(inputs: list[fx.Node]) -> dict[tuple[str, str], fx.Node]:
    """Maps (kind, name) to an input, for the inputs that share this key with no other."""
    keys = [(str(input_kind(node)), str(input_name(node))) for node in inputs]
    counted = Counter(keys)
    pairs = zip(keys, inputs, strict=True)
    return {key: n for key, n in pairs if counted[key] == 1 and carried_index(n) is None}


def _alike(one: fx.Node, other: fx.Node) -> bool:
    first, second = known_value(one), known_value(other)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return layout_of(first) == layout_of(second)


def continuation_of(stopped: StoppedGraph, other: IterGraphModule) -> Continuation:
    """Derives the rest of another branch's graph from what the stopped graph has computed.

    Args:
        other: after its passes.

    Raises:
        NotSharedError: they share nothing, or it cannot be shown that they do.
    """
    try:
        return _ContinuationBuilder(stopped, other).made()
    except NotDecidedError as error:
        raise NotSharedError(str(error)) from error


class _ContinuationBuilder:
    """Builds one `Continuation`."""

    def __init__(self, stopped: StoppedGraph, other: IterGraphModule) -> None:
        self._stopped = stopped
        self._terms = Terms()
        self._graph, _ = copy_graph(other.graph, into=fx.Graph)
        self._root = other
        for node in self._graph.nodes:
            node.args = without_handed_out(node)
        names, self._same = stopped.names(other.graph)
        copies = dict(zip(other.graph.nodes, self._graph.nodes, strict=True))
        self._names = {copies[node]: name for node, name in names.items()}

    def made(self) -> Continuation:
        before = self._stopped.course.evaluated(self._terms)
        whole, value_of = self._whole()
        drawn = self._drawn(before, whole)
        given = dict(before.made)
        nodes = self._stopped.nodes
        there = handed_out(nodes, {node: given.get(found) for node, found in nodes.items()})
        roots = [node for node in self._graph.nodes if is_host_call(node)]
        roots += get_output(self._graph).all_input_nodes
        cut = GraphCut(roots, value_of, there, drawn)
        if not any(map(_computes, set(self._graph.nodes) - cut.left)):
            raise NotSharedError("nothing is computed before the decision that both branches need")
        module = self._left(cut)
        taken = list(dict.fromkeys(cut.taken[node] for node in in_order(self._graph, {*cut.taken})))
        found = Continuation(module, taken, self._begins(taken), self._same, len(drawn))
        self._prove(found, whole)
        return found

    def _whole(self) -> tuple[Evaluation, dict[fx.Node, Any]]:
        """Evaluates the other branch's graph symbolically from the beginning."""
        course = Course(self._stopped.course.names)
        for node in self._graph.find_nodes(op="placeholder"):
            name = self._names.get(node) or course.names.of_input()
            self._names[node] = name
        self._graph.owning_module = self._root
        values = {node: course.add_input(node, name) for node, name in self._names.items()}
        found, nodes = course.evaluated_with(self._graph, values, self._terms)
        given = dict(found.made)
        return found, {node: given.get(copy) for node, copy in nodes.items()}

    def _drawn(self, before: Evaluation, whole: Evaluation) -> set[fx.Node]:
        """The nodes whose random numbers the stopped graph has already drawn."""
        nodes = [node for node in self._graph.nodes if draws(node)]
        done = len(before.draws)
        if before.states or len(nodes) != len(whole.draws) or whole.draws[:done] != before.draws:
            raise NotSharedError("other random numbers were drawn, or state was updated")
        return set(nodes[:done])

    def _left(self, cut: GraphCut) -> IterGraphModule:
        """Builds a module of the nodes that still have to run."""
        graph = IterGraph()
        new: dict[fx.Node, fx.Node] = {}
        for node in self._graph.find_nodes(op="placeholder"):
            new[node] = graph.node_copy(node, new.__getitem__)
        given: dict[fx.Node, fx.Node] = {}
        for node in in_order(self._graph, {*cut.taken}):
            source = cut.taken[node]
            if source not in given:
                given[source] = _carried(graph, len(given), node)
            new[node] = given[source]
        for node in in_order(self._graph, cut.left):
            if node.op not in ("placeholder", "output"):
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(fx.node.map_arg(get_output(self._graph).args[0], new.__getitem__))
        _refuse_storages(graph)
        _own_outputs(graph)
        return IterGraphModule(fx.GraphModule(self._root, graph))

    def _begins(self, taken: list[fx.Node]) -> Beginning:
        """Returns a function that forks the course of the stopped graph for the rest."""
        course, nodes = self._stopped.course, self._stopped.nodes
        there_already = [nodes[node] for node in taken]
        names = [self._names[node] for node in self._graph.find_nodes(op="placeholder")]

        def begins(graph: fx.Graph) -> tuple[Course, dict[fx.Node, fx.Node]]:
            fork, copies = course.forked()
            there = {str(n.target): n for n in fork.graph.find_nodes(op="placeholder")}
            inputs = graph.find_nodes(op="placeholder")
            values = {}
            for node, name in zip(inputs, names, strict=False):
                values[node] = there[name] if name in there else fork.add_input(node, name)
            for node in inputs[len(names) :]:
                values[node] = copies[there_already[cast(int, carried_index(node))]]
            return fork, values

        return begins

    def _prove(self, found: Continuation, whole: Evaluation) -> None:
        """Proves that the computed part followed by the rest equals the other branch's graph."""
        graph = found.module.graph
        course, values = found.begins(graph)
        now, _ = course.evaluated_with(graph, values, self._terms)
        problems = list(differences(self._terms, whole, now))
        if problems:
            raise NotSharedError("\n".join(map(str, problems)))


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.all_input_nodes) and not is_pure_view(node)


def _carried(graph: fx.Graph, index: int, node: fx.Node) -> fx.Node:
    """Adds an input for a value that was computed before."""
    found = graph.placeholder(f"carried_{index}_{node.name}")
    describe_carried(found, node, index)
    return found


def _of_carried(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Returns a test if a node shares storage with a value that was computed before."""
    effects = Effects(graph)

    def tell(node: fx.Node) -> bool:
        owner = effects.input_of(node)
        return owner is not None and carried_index(owner) is not None

    return tell


def _refuse_storages(graph: fx.Graph) -> None:
    """Refuses operators that count from the beginning of a storage, where a value computed before
    may have another offset than the graph assumes."""
    is_carried = _of_carried(graph)
    for node in graph.nodes:
        if is_operator(node.target, *OF_STORAGE) and any(map(is_carried, node.all_input_nodes)):
            raise NotSharedError(f"%{node.name} reads a storage as a whole")


def _own_outputs(graph: IterGraph) -> None:
    """Clones outputs that share storage with values computed before."""
    is_carried, outputs = _of_carried(graph), get_outputs(graph)
    leaving = [n for n in (*outputs.results, *outputs.carried) if isinstance(n, fx.Node)]
    shared, output = [node for node in leaving if is_carried(node)], get_output(graph)
    if len(set(shared)) < len(shared):
        raise NotSharedError("the other branch returns one tensor twice")
    for node in shared:
        with graph.inserting_before(output):
            clone = _clone(graph, node)
        node.replace_all_uses_with(clone, delete_user_cb=lambda user: user is output)


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = torch.ops.aten.clone.default
    found = call_function_with_meta(graph, clone, (node,), like=node)
    if fake_value(found).stride() != fake_value(node).stride():
        raise NotSharedError(f"%{node.name}, which is returned, has other strides as a copy")
    return found
